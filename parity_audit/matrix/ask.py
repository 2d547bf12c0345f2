"""Run `audit`, `logprobs` or `invariance` once for a group of cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity_audit import api
from parity_audit.core.card import Asked, Question
from parity_audit.core.invariance_report import InvarianceReport
from parity_audit.core.logprob_report import LogprobReport
from parity_audit.core.progress import Progress
from parity_audit.core.report import Report

QUICK = "--quick"


def ask(
    group: Sequence[Asked], *, out: Path, install: bool, progress: Progress, captures: Path | None = None
) -> Report | LogprobReport | InvarianceReport:  # fmt: skip
    """Run cells that differ in their candidate only, and return the report. A group of log-probabilities has one cell.

    `captures`: a folder with captures of the reference and judge, which an audit then uses instead of running them.

    Raises:
        UsageError: the question is malformed.
        NotJudged: nothing could be compared.
    """
    first, candidates = group[0], [asked.candidate for asked in group]
    if first.question is Question.LOGPROBS:
        (engine,) = candidates
        return api.logprobs(
            first.model, engine=engine, trainer=first.reference, miniature=first.synthetic, seed=first.seed,
            dtype=first.dtype, device=first.device, out=out, install=install, progress=progress,
        )  # fmt: skip
    if first.question is Question.INVARIANCE:
        return api.invariance(
            first.model, candidates=candidates, reference=first.reference, quick=QUICK in first.options,
            miniature=first.synthetic, seed=first.seed, dtype=first.dtype, device=first.device, out=out, install=install,
            progress=progress,
        )  # fmt: skip
    return api.audit(
        first.model, candidates=candidates, reference=first.reference, miniature=first.synthetic, seed=first.seed,
        dtype=first.dtype, device=first.device, probes=list(first.probes) or None, repair=first.repair, out=out,
        install=install, captures=captures, progress=progress,
    )  # fmt: skip


def runs(cells: Sequence[Asked]) -> list[list[Asked]]:
    """Group cells of the same model, dtype and question, so that one run of the reference serves all of them.

    Each cell about log-probabilities is a group of its own.
    """
    found: dict[tuple[str, ...], list[Asked]] = {}
    for asked in cells:
        alone = asked.candidate if asked.question is Question.LOGPROBS else ""
        found.setdefault((asked.model, asked.dtype, asked.question.value, alone), []).append(asked)
    return list(found.values())
