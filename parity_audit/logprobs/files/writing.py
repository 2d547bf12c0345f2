"""Write per-token results for other programs: JSONL and CSV always, XLSX and Parquet if the user asks for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parity_audit.core.jsonio import from_plain
from parity_audit.core.logprob_report import LogprobReport, TokenTable

COLUMNS = ("sequence", "position", "token_id", "rollout_logprob", "train_logprob", "difference")
FIELDS = ("sequence", "position", "token_id", "rollout", "train")
"""The fields of a `TokenTable`; the files have one more column, the trainer's log-probability minus the rollout's."""
SHEET_ROWS = 1 << 20
"""Rows that one sheet of an XLSX workbook can hold, its title row included."""


def write_tokens(tokens: TokenTable, folder: Path) -> tuple[Path, Path]:
    """Write tokens.jsonl and tokens.csv, and return both paths."""
    jsonl, table = folder / "tokens.jsonl", folder / "tokens.csv"
    with jsonl.open("w", encoding="utf-8") as lines, table.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        for row in _rows(tokens):
            lines.write(json.dumps(dict(zip(COLUMNS, row, strict=True)), allow_nan=False) + "\n")
            writer.writerow(row)
    return jsonl, table


def read_tokens(folder: Path) -> TokenTable | None:
    """Return the tokens of the tokens.jsonl beside a report; None if the file is missing, empty or malformed."""
    try:
        with (folder / "tokens.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        columns = {field: [row[name] for row in rows] for field, name in zip(FIELDS, COLUMNS, strict=False)}
        return from_plain(TokenTable, columns) if rows else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_parquet(tokens: TokenTable, path: Path) -> None:
    """Write one row per token; raises ImportError if pyarrow is not installed."""
    import pyarrow
    from pyarrow import parquet

    columns = zip(*_rows(tokens), strict=True)
    parquet.write_table(
        pyarrow.table({name: list(values) for name, values in zip(COLUMNS, columns, strict=True)}), path
    )


def write_workbook(report: LogprobReport, tokens: TokenTable, path: Path) -> None:
    """Write a workbook with sheets for legs, metrics, worst tokens and all tokens. Needs openpyxl.

    All tokens take several sheets if they are more than `SHEET_ROWS - 1`. Every string is written as a text cell, so that a
    model name or a token that starts with "=" does not become a formula.
    """
    from openpyxl import Workbook

    book = Workbook(write_only=True)
    _sheet(book, "legs", ("leg", "program", "version", "RMSE to judge", "ratio", "what its numbers are"), [
        (leg.name, leg.package, leg.version, leg.rmse_to_judge, leg.noise_ratio, leg.meaning) for leg in report.legs
    ])  # fmt: skip
    _sheet(book, "metrics", ("rollout", "train", "metric", "value", "low", "high"), [
        (pair.rollout, pair.train, name, value, *pair.intervals.get(name, (None, None)))
        for pair in report.pairs
        for name, value in pair.metrics.items()
    ])  # fmt: skip
    _sheet(book, "worst tokens", ("sequence", "position", "token_id", "text", "before", "after", "rollout", "train"), [
        (row.sequence, row.position, row.token_id, row.text, row.before, row.after, row.rollout, row.train)
        for row in report.worst
    ])  # fmt: skip
    rows = list(_rows(tokens))
    for number, first in enumerate(range(0, len(rows), SHEET_ROWS - 1), 1):
        _sheet(book, "tokens" if number == 1 else f"tokens {number}", COLUMNS, rows[first : first + SHEET_ROWS - 1])
    book.save(path)


def _sheet(book: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    sheet = book.create_sheet(title)
    sheet.append(list(columns))
    for row in rows:
        cells = []
        for value in row:
            cell = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("\ufffd", value) if isinstance(value, str) else value)
            if isinstance(value, str):
                cell.data_type = "s"
            cells.append(cell)
        sheet.append(cells)


def _rows(tokens: TokenTable) -> Iterator[tuple[Any, ...]]:
    columns = (tokens.sequence, tokens.position, tokens.token_id, tokens.rollout, tokens.train)
    for sequence, position, token, rollout, train in zip(*columns, strict=True):
        yield sequence, position, token, rollout, train, train - rollout
