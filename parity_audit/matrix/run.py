"""Run the cells that have no current card; cells that share a reference run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from parity_audit.capture.workspace import own_folder
from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import Interrupted, ParityError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.matrix.ask import ask, runs
from parity_audit.matrix.card_from_report import cards_of, failed_card
from parity_audit.matrix.cards import current_card, write_card


def run_cells(
    wanted: Sequence[Asked], folder: Path, *, again: bool = False, together: bool = True, install: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Card]:  # fmt: skip
    """Yield the card of every cell; each new card is written as soon as its run has ended.

    Args:
        again: also run cells whose card is current.
        together: use one run for all candidates of a model and dtype; otherwise each cell loads the reference again.
    """
    known = {asked: None if again else current_card(folder, asked) for asked in wanted}
    yield from (card for card in known.values() if card is not None)
    missing = [asked for asked, card in known.items() if card is None]
    groups = runs(missing) if together else [[asked] for asked in missing]
    for number, group in enumerate(groups):
        progress.update(
            "matrix", f"{group[0].model}: {group[0].question.value}, {len(group)} cells", number, len(groups)
        )
        for card in judged(group, install=install, progress=progress):
            write_card(card, folder)
            yield card


def judged(
    group: Sequence[Asked], *, install: bool, progress: Progress, captures: Path | None = None
) -> list[Card]:  # fmt: skip
    """Return a card for every cell.

    If the common run of several cells fails, each is run alone, so that a cell that fails does not affect the others.

    `captures`: a folder with the captures of these cells' reference and judge, if they exist already.
    """
    try:
        with own_folder("matrix-") as out:
            report = ask(group, out=out, install=install, progress=progress, captures=captures)
    except Interrupted:
        raise
    except ParityError as error:
        if len(group) == 1:
            return [failed_card(group[0], error)]
        return [card for asked in group for card in judged([asked], install=install, progress=progress)]
    return cards_of(report, [asked.candidate for asked in group], group[0])
