"""A series of reports as blocks, and the comparison of a report with a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity_audit.core.report import Baseline
from parity_audit.report.blocks import SPACE, Block, columns, heading, pairs, paragraph
from parity_audit.report.numbers import number, ratio
from parity_audit.report.words import LABEL_SETTINGS

SERIES = ("date", "model", "candidate", "release", "verdict", "noise ratio", "max |difference|", "to the one before")


def history_content(entries: Sequence[Any]) -> list[Block]:
    """Return a table with one row per candidate and report.

    A row has `other question` in place of a ratio if the report before it asked a different question.
    """
    rows = [
        (one.date[:16], one.model, _short(one.candidate), one.version, one.verdict, ratio(one.noise_ratio), number(one.max_abs),
         ratio(one.ratio) if one.same_question else "other question")
        for one in entries
    ]  # fmt: skip
    return [columns(SERIES, rows, right=(5, 6, 7))]


def _short(candidate: str) -> str:
    """Return the backend with its settings, or without them if the name is long; `--json` has them all."""
    return candidate if len(candidate) <= LABEL_SETTINGS else f"{candidate.partition(',')[0]},..."


def baseline_content(baseline: Baseline | None) -> list[Block]:
    """Return every figure next to the baseline's and the departures, or the reason why nothing was compared."""
    if baseline is None:
        return []
    blocks: list[Block] = [SPACE, heading("Against the baseline")]
    if baseline.changed_question:
        asked = ", ".join(baseline.changed_question)
        return [*blocks, paragraph(f"Not comparable: the baseline was asked another question. It differs in {asked}.")]
    rows = [
        (
            one.candidate,
            one.figure,
            number(one.before),
            number(one.now),
            ratio(one.ratio),
            "yes" if one.within else "no",
        )
        for one in baseline.figures
    ]
    titles = ("candidate", "figure", "baseline", "now", "ratio", f"within {baseline.band:g}x either way")
    blocks.append(columns(titles, rows, right=(2, 3, 4)))
    said = [("departs", line) for line in baseline.departures] or [("as before", "no figure left its band")]
    return [*blocks, pairs(said)]
