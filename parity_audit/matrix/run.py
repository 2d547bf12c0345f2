"""Run the cells that have no current card: one audit per model and dtype, so that the reference runs once for all candidates."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from parity_audit import api
from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import Interrupted, ParityError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Report
from parity_audit.matrix.cards import card_of, current_card, failed_card, write_card


def run_cells(
    wanted: Sequence[Asked], folder: Path, *, again: bool = False, together: bool = True, install: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Card]:  # fmt: skip
    """Yield the card of every cell, and write those that are new as soon as their audit has ended.

    Args:
        again: also run cells whose card is current.
        together: one audit for all candidates of a model and dtype; else one for each, which loads the reference anew.
    """
    known = {asked: None if again else current_card(folder, asked) for asked in wanted}
    yield from (card for card in known.values() if card is not None)
    missing = [asked for asked, card in known.items() if card is None]
    groups = [list(group) for _, group in itertools.groupby(missing, key=lambda asked: (asked.model, asked.dtype))]
    if not together:
        groups = [[asked] for asked in missing]
    for number, group in enumerate(groups):
        progress.update("matrix", f"{group[0].model}: {len(group)} cells", number, len(groups))
        for card in _judged(group, install, progress):
            write_card(card, folder)
            yield card


def _judged(group: Sequence[Asked], install: bool, progress: Progress) -> list[Card]:
    """A card for every cell; where the audit of several breaks off, each is asked alone, so that one cannot spoil the others."""
    try:
        report = _audit(group, install, progress)
    except Interrupted:
        raise
    except ParityError as error:
        if len(group) == 1:
            return [failed_card(group[0], error)]
        return [card for asked in group for card in _judged([asked], install, progress)]
    return [card_of(report, candidate, asked) for candidate, asked in zip(report.candidates, group, strict=True)]


def _audit(group: Sequence[Asked], install: bool, progress: Progress) -> Report:
    first = group[0]
    with tempfile.TemporaryDirectory(prefix="parity-audit-matrix-") as out:
        return api.audit(
            first.model, candidates=[asked.candidate for asked in group], reference=first.reference,
            miniature=first.synthetic, seed=first.seed, dtype=first.dtype, device=first.device,
            probes=list(first.probes) or None, repair=first.repair, out=out, install=install, progress=progress,
        )  # fmt: skip
