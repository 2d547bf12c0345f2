"""Runs the corpus: the faults of each model are audited in groups, each fault as one candidate, together with a clean port."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parity_audit.api import audit
from parity_audit.core.errors import NotJudged
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Candidate, Report, Verdict
from parity_audit.selftest.corpus import Corpus, Fault
from parity_audit.selftest.ports import candidate_for
from parity_audit.selftest.score import Score, not_judged, score

CLEAN = Fault(id="clean", plant=[], knob="", harmless=True)
AT_ONCE = 12
NO_WEIGHTS: Mapping[str, Path] = {}
SHORT_PROBES = (
    "short", "repeated", "ragged", "left_padded", "decode", "ids", "batch", "decode_batch", "continued", "one", "two", "again",
)  # fmt: skip
"""All probes but the long text, which costs more than all of these together."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The scores of a run, those of clean ports included, and its duration."""

    scores: tuple[Score, ...]
    seconds: float


def run_corpus(
    corpus: Corpus, *, repair: bool = True, seed: int = 0, synthetic: str = "mini", progress: Progress = SILENT,
    keep: Callable[[Result], None] = lambda _: None, weights: Mapping[str, Path] = NO_WEIGHTS,
) -> Result:  # fmt: skip
    """Audit every fault of a corpus and score the findings.

    `keep` is called with the results so far after every audit. `weights` gives, by model, a directory of weights to use instead of
    the model's miniature, with the same sizes.
    """
    started = time.perf_counter()
    scores: list[Score] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, faults in corpus.by_model.items():
            clean = CLEAN.model_copy(update={"id": f"{model} clean", "model": model})
            for group in _groups([clean, *faults]):
                scores += _run_group(
                    model, group, Path(scratch), repair=repair, seed=seed, synthetic=synthetic, progress=progress,
                    weights=weights.get(model),
                )  # fmt: skip
                keep(Result(scores=tuple(scores), seconds=time.perf_counter() - started))
    return Result(scores=tuple(scores), seconds=time.perf_counter() - started)


def _groups(faults: Sequence[Fault]) -> Iterator[Sequence[Fault]]:
    """Yield groups of at most `AT_ONCE` faults with the same probes.

    A group shares one reference and one judge; the captures of more candidates at once would fill the disk.
    """
    for long in (False, True):
        alike = [fault for fault in faults if fault.long == long]
        yield from (alike[start : start + AT_ONCE] for start in range(0, len(alike), AT_ONCE))


def _run_group(
    model: str, faults: Sequence[Fault], scratch: Path, *, repair: bool, seed: int, synthetic: str, progress: Progress,
    weights: Path | None,
) -> list[Score]:  # fmt: skip
    ports = [candidate_for(scratch / "ports", f"fault_{number}", fault) for number, fault in enumerate(faults)]
    try:
        report: Report = audit(
            model, candidates=ports, miniature=None if weights else synthetic, weights=weights, seed=seed, repair=repair,
            out=scratch / "out", progress=progress,
            probes=None if faults[0].long else SHORT_PROBES, limits=False,
        )  # fmt: skip
    except NotJudged as error:  # The reference of this model could not be judged; the other models have their own.
        return [not_judged(fault, str(error)) for fault in faults]
    return [
        _scored(fault, candidate, repair=repair) for fault, candidate in zip(faults, report.candidates, strict=True)
    ]


def _scored(fault: Fault, candidate: Candidate, *, repair: bool) -> Score:
    found = score(fault, candidate, repair=repair)
    return replace(found, detected=False) if candidate.verdict is Verdict.ERROR else found
