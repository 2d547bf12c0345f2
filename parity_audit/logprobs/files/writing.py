"""Per-token results as files that other programs read: JSONL and CSV, one row per sampled token."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity_audit.core.logprob_report import TokenTable

COLUMNS = ("sequence", "position", "token_id", "rollout_logprob", "train_logprob", "difference")


def write_tokens(tokens: TokenTable, folder: Path) -> tuple[Path, Path]:
    """Write tokens.jsonl and tokens.csv; returns both paths."""
    rows = list(_rows(tokens))
    jsonl, table = folder / "tokens.jsonl", folder / "tokens.csv"
    jsonl.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    with table.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return jsonl, table


def _rows(tokens: TokenTable) -> Iterator[dict[str, Any]]:
    columns = (tokens.sequence, tokens.position, tokens.token_id, tokens.rollout, tokens.train)
    for sequence, position, token, rollout, train in zip(*columns, strict=True):
        values = (sequence, position, token, rollout, train, train - rollout)
        yield dict(zip(COLUMNS, values, strict=True))
