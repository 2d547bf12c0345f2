"""The command's parts: which cells are asked for, run them, and the table of all cards in every format."""

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
    """All cards of a folder, the cells that have none, and the exit code of those that this command asked for."""

    cards: tuple[Card, ...]
    not_run: tuple[Asked, ...]
    exit_code: int


def answer(
    asked: Matrix, *, file: Path | None, folder: Path | None, again: bool = False, together: bool = True,
    install: bool = True, run: bool = True, fleet: Fleet | None = None, progress: Progress = SILENT,
) -> Table:  # fmt: skip
    """Run the cells that were asked for, and read the whole folder; without a model and a file, only read.

    `fleet`: the cluster that runs them, each as a task of its own; this process where it is None.

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
    """As of one audit over all: 3 where a cell broke off, 1 where one mismatches; releases that cannot run a model do not count."""
    able = [card for card in cards if (card.error or {}).get("code") != CannotRun.default_code]
    if any(card.verdict in (Verdict.ERROR, Verdict.INCONCLUSIVE) for card in able) or (cards and not able):
        return EXIT_NOT_JUDGED
    return EXIT_OK if all(card.verdict in GOOD for card in able) else EXIT_MISMATCH


def write(table: Table, folder: Path) -> None:
    """`matrix.md` and `matrix.html`.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    with refusals_of_the_disk("write the table", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, format in (("matrix.md", "markdown"), ("matrix.html", "html")):
            (folder / name).write_text(rendered(table, format), encoding="utf-8")


def rendered(table: Table, format: str, *, width: int = 160, quiet: bool = False, colour: bool = False) -> str:
    """The table as text in one of the formats of the command."""
    blocks = matrix_content(table.cards, table.not_run)
    if format == "json":
        return dumps({"cards": table.cards, "not_run": table.not_run}, indent=1) + "\n"
    if format == "markdown":
        return markdown.written(blocks)
    if format == "html":
        return matrix_page.render(table.cards, table.not_run)
    return headline(table.cards, table.not_run) + "\n" if quiet else printed(blocks, width=width, colour=colour)
