"""An audit held against an earlier one: whether it asked the same question, and whether any figure left its band."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK
from parity_audit.core.report import Baseline, BaselineFigure, Candidate, Report, Verdict

BAND = 4.0
"""How far a figure may move, up or down, before it is no longer the same rounding: the limit that parity itself has. Another
processor or number of threads moves a noise ratio by less than this; a figure that suddenly improves by more says that
something else is compared than before."""
FIGURES = ("max_abs", "rmse", "rel", "noise_ratio")
RANK = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH, Verdict.INCONCLUSIVE, Verdict.ERROR)


def signature(report: Report) -> dict[str, Any]:
    """What has to be equal for two audits to be comparable: model, weights, dtype, device, and every token of every probe.

    Releases are not in it: a new release is what a baseline is for.
    """
    probes = {f"probe {probe.get('name')}": (probe.get("shape"), probe.get("tokens")) for probe in report.probes}
    side = report.reference
    return {
        "model": report.model,
        "weights": report.weights.get("fingerprint"),
        "reference": None if side is None else f"{side.backend} in {side.dtype} on {side.device}",
        "reference settings": None if side is None else side.settings,
        **probes,
    }


def held_against(report: Report, earlier: Report) -> Report:
    """The report with its comparison to an earlier one; exit code 1 where a figure left its band, 3 where the question changed."""
    changed = changed_question(signature(earlier), signature(report))
    figures = () if changed else tuple(_figures(report.candidates, earlier.candidates))
    departures = () if changed else tuple(_departures(report.candidates, earlier.candidates, figures))
    code = report.exit_code
    if changed:
        code = EXIT_NOT_JUDGED
    elif departures and code == EXIT_OK:
        code = EXIT_MISMATCH
    baseline = Baseline(band=BAND, changed_question=changed, figures=figures, departures=departures)
    return dataclasses.replace(report, baseline=baseline, exit_code=code)


def changed_question(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    """Names of what differs; a probe whose tokens were not recorded cannot be shown to be the same."""
    unknown = {
        name for side in (before, now) for name, value in side.items() if name.startswith("probe") and value[1] is None
    }
    differing = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return tuple(dict.fromkeys([*differing, *sorted(unknown)]))


def name_of(candidate: Candidate) -> str:
    """A candidate without its release, which may differ from that of the baseline."""
    settings = ",".join(f"{key}={value}" for key, value in sorted(candidate.settings.items()))
    return f"{candidate.backend},{settings}" if settings else candidate.backend


def _pairs(
    now: Sequence[Candidate], before: Sequence[Candidate]
) -> Iterator[tuple[str, Candidate | None, Candidate | None]]:
    """Every candidate of either audit; of several releases of one backend the n-th belongs to the n-th."""
    ours, theirs = _numbered(now), _numbered(before)
    for name in dict.fromkeys([*theirs, *ours]):
        yield name, ours.get(name), theirs.get(name)


def _numbered(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    named: dict[str, Candidate] = {}
    for one in candidates:
        name, count = name_of(one), sum(name_of(one) == key.partition(" #")[0] for key in named)
        named[name if not count else f"{name} #{count + 1}"] = one
    return named


def _figures(now: Sequence[Candidate], before: Sequence[Candidate]) -> Iterator[BaselineFigure]:
    for name, ours, theirs in _pairs(now, before):
        if ours is None or theirs is None or ours.logits is None or theirs.logits is None:
            continue
        for figure in FIGURES:
            new, old = getattr(ours.logits, figure), getattr(theirs.logits, figure)
            if new is not None and old is not None:
                yield _figure(name, figure, old, new)


def _figure(name: str, figure: str, before: float, now: float) -> BaselineFigure:
    """Zero stays zero; a figure that was zero, or became zero, has no ratio and is out of its band."""
    if before == now:
        return BaselineFigure(candidate=name, figure=figure, before=before, now=now, ratio=1.0, within=True)
    if before <= 0.0 or now <= 0.0:
        return BaselineFigure(candidate=name, figure=figure, before=before, now=now, ratio=None, within=False)
    ratio = now / before
    within = abs(math.log(ratio)) <= math.log(BAND)
    return BaselineFigure(candidate=name, figure=figure, before=before, now=now, ratio=ratio, within=within)


def _departures(
    now: Sequence[Candidate], before: Sequence[Candidate], figures: Sequence[BaselineFigure]
) -> Iterator[str]:
    """In words: verdicts that changed, candidates that are missing, figures out of their band."""
    for name, ours, theirs in _pairs(now, before):
        if ours is None:
            yield f"{name}: was judged in the baseline, and not in this audit"
        elif theirs is None:
            yield f"{name}: is not in the baseline"
        elif ours.verdict is not theirs.verdict:
            worse = RANK.index(ours.verdict) > RANK.index(theirs.verdict)
            yield f"{name}: {theirs.verdict.value} became {ours.verdict.value}, which is {'worse' if worse else 'better'}"
    for item in figures:
        if not item.within:
            worse = item.now > item.before
            yield f"{item.candidate}: {item.figure} went from {item.before:.3g} to {item.now:.3g}, {'worse' if worse else 'better'}"
