"""The parts of `parity-audit matrix`: run the requested cells, and write the table of all cards in every format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK, CannotRun, refusals_of_the_disk
from parity_audit.core.jsonio import dumps
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Verdict
from parity_audit.matrix.cards import CARDS, card_path, read_cards
from parity_audit.matrix.cells import Matrix, cells, read_matrix
from parity_audit.matrix.fleet.run import Fleet, run_fleet
from parity_audit.matrix.run import run_cells
from parity_audit.report import markdown, matrix_page
from parity_audit.report.matrix_content import headline, matrix_content
from parity_audit.report.terminal import printed

GOOD = (Verdict.EXACT, Verdict.PARITY)


@dataclass(frozen=True, kw_only=True)
class Table:
    """All cards of a folder, the requested cells without a card, and the exit code over the requested cells."""

    cards: tuple[Card, ...]
    not_run: tuple[Asked, ...]
    exit_code: int


def answer(
    asked: Matrix, *, file: Path | None, folder: Path | None, again: bool = False, together: bool = True,
    install: bool = True, run: bool = True, fleet: Fleet | None = None, progress: Progress = SILENT,
) -> Table:  # fmt: skip
    """Run the requested cells, then read all cards of the folder; without models, candidates and file, only read.

    `fleet`: the cluster that runs the cells as separate tasks; None runs them in this process.

    Raises:
        UsageError: a model, BACKEND or matrix file is malformed.
        NotJudged: a file in the folder is not a card.
    """
    folder = folder or CARDS
    matrix = read_matrix(file) if file else asked
    wanted = cells(matrix) if file or asked.models or asked.candidates else []
    if not run:
        done = []
    elif fleet is None:
        done = list(run_cells(wanted, folder, again=again, together=together, install=install, progress=progress))
    else:
        there = dataclasses.replace(fleet, rules=matrix.resources)
        done = list(run_fleet(wanted, folder, there, again=again, install=install, progress=progress))
    missing = tuple(one for one in wanted if not card_path(folder, one).is_file())
    return Table(cards=tuple(read_cards(folder)), not_run=missing, exit_code=exit_code_of(done))


def exit_code_of(cards: Sequence[Card]) -> int:
    """Return the exit code over all cards: 3 if a cell was not judged, else 1 if one mismatches, else 0.

    Cards of releases that cannot run the model are left out; if there are only such cards, the code is 3.
    """
    able = [card for card in cards if (card.error or {}).get("code") != CannotRun.default_code]
    if any(card.verdict in (Verdict.ERROR, Verdict.INCONCLUSIVE) for card in able) or (cards and not able):
        return EXIT_NOT_JUDGED
    return EXIT_OK if all(card.verdict in GOOD for card in able) else EXIT_MISMATCH


def write(table: Table, folder: Path) -> None:
    """Write the table to `matrix.md` and `matrix.html` in a folder.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    with refusals_of_the_disk("write the table", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, format in (("matrix.md", "markdown"), ("matrix.html", "html")):
            (folder / name).write_text(rendered(table, format), encoding="utf-8")


def rendered(table: Table, format: str, *, width: int = 160, quiet: bool = False, colour: bool = False) -> str:
    """Return the table as text in one of the command's formats; `quiet` reduces the terminal format to the headline."""
    blocks = matrix_content(table.cards, table.not_run)
    if format == "json":
        return dumps({"cards": table.cards, "not_run": table.not_run}, indent=1) + "\n"
    if format == "markdown":
        return markdown.written(blocks)
    if format == "html":
        return matrix_page.render(table.cards, table.not_run)
    return headline(table.cards, table.not_run) + "\n" if quiet else printed(blocks, width=width, colour=colour)
