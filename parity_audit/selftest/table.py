"""The hit table: how many planted faults were detected, located, named, given the right value, and repaired."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from parity_audit.selftest.run import Result
from parity_audit.selftest.score import LISTED, MISSED, NAMED, Score, share

QUESTIONS = (
    ("detected", "detected"),
    ("placed", "first site exact"),
    ("named", "knob named"),
    ("layers", "layers exact"),
    ("valued", "value within 1 %"),
    ("extent", "extent said"),
    ("repaired", "repaired by its patch"),
    ("recognised", "unpatchable recognised"),
    ("proved", "unpatchable proved"),
)
BINS = (0.0, 0.5, 0.8, 0.95, 1.01)


def hit_rows(scores: Sequence[Score]) -> list[tuple[str, int, int]]:
    """Return (question, right answers, faults to which it applied) for each question, over planted faults without clean ports."""
    planted = [score for score in scores if not score.id.endswith(" clean")]
    return [(label, *share(getattr(score, name) for score in planted)) for name, label in QUESTIONS]


def by_origin(scores: Sequence[Score]) -> dict[str, list[tuple[str, int, int]]]:
    """Return the rows of `hit_rows` separately for faults written one by one and for templates (one fault per architecture)."""
    return {
        name: hit_rows([score for score in scores if score.template is template])
        for name, template in (("written one by one", False), ("templates", True))
    }


def too_many(scores: Sequence[Score]) -> int:
    """Return the number of findings that name nothing that was planted, over all planted faults."""
    return sum(len(score.false_alarms) for score in scores if not score.id.endswith(" clean"))


def misjudged(scores: Sequence[Score]) -> bool:
    """Whether any verdict is wrong, any fault was not named, or any finding names something that was not planted."""
    return any(not score.detected or score.named is False or score.false_alarms for score in scores)


def part_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Return how many parts of stacked faults were named, listed and missed, and their number of false alarms; {} without any."""
    stacked = [score for score in scores if score.parts]
    if not stacked:
        return {}
    parts = [part for score in stacked for part in score.parts]
    counts = {what: parts.count(what) for what in (NAMED, LISTED, MISSED)}
    return {"parts": len(parts), **counts, "findings too many": sum(len(score.false_alarms) for score in stacked)}


def false_alarms(scores: Sequence[Score]) -> tuple[int, int]:
    """Return (clean ports with a finding or a wrong verdict, all clean ports)."""
    clean = [score for score in scores if score.id.endswith(" clean")]
    return sum(bool(score.found) or not score.detected for score in clean), len(clean)


def calibration(scores: Sequence[Score]) -> list[tuple[str, int, int]]:
    """Return (range, faults named right, faults with findings) per range of confidence, to check that confidence means something."""
    rows = []
    for low, high in pairwise(BINS):
        chosen = [
            score for score in scores if score.named is not None and score.found and low <= score.confidence < high
        ]
        rows.append((f"{low:.2f}-{min(high, 1.0):.2f}", sum(bool(score.named) for score in chosen), len(chosen)))
    return rows


def missed(scores: Sequence[Score]) -> list[Score]:
    """Return the faults with a wrong answer, an error or a false alarm, and the clean ports with a finding.

    A fault that was only not proved is not among them.
    """
    asked = [name for name, _ in QUESTIONS if name != "proved"]
    return [
        score
        for score in scores
        if any(getattr(score, name) is False for name in asked)
        or score.error
        or score.false_alarms
        or (score.id.endswith(" clean") and score.found)
    ]


def _wrong(score: Score) -> str:
    """Return in words what the audit got wrong about one fault."""
    if score.error:
        return f"error: {score.error}"
    wrong = [f"not {label}" for name, label in QUESTIONS if getattr(score, name) is False]
    wrong += [f"too many: {said}" for said in score.false_alarms]
    return ", ".join(wrong) or "accused"


def to_json(result: Result) -> dict[str, Any]:
    """Return all results as JSON data for scripts."""
    accused, clean = false_alarms(result.scores)
    return {
        "hits": {label: {"right": right, "asked": asked} for label, right, asked in hit_rows(result.scores)},
        "by_origin": {
            name: {label: {"right": right, "asked": asked} for label, right, asked in rows}
            for name, rows in by_origin(result.scores).items()
        },
        "findings_too_many": too_many(result.scores),
        "stacked": part_counts(result.scores),
        "clean": {"accused": accused, "asked": clean},
        "calibration": [{"confidence": name, "right": right, "findings": n} for name, right, n in calibration(result.scores)],
        "seconds": result.seconds,
        "missed": [{"id": score.id, "wrong": _wrong(score), "found": list(score.found)} for score in missed(result.scores)],
        "scores": [dataclasses.asdict(score) for score in result.scores],
    }  # fmt: skip
