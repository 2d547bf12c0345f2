"""Compare an audit with an earlier one (the baseline).

The comparison says whether both audits asked the same question (see `signature`), which verdicts changed, and which
numbers moved by more than a factor of `BAND`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK
from parity_audit.core.report import Baseline, BaselineFigure, Candidate, Report, Verdict

BAND = 4.0
"""The largest factor by which a figure may grow or shrink between two audits: the limit that parity itself has.

Another processor or another number of threads changes a noise ratio by less than this factor. A figure that improves by
more is reported as well, because it suggests that something else is compared than before.
"""
FIGURES = ("max_abs", "rmse", "rel", "noise_ratio")
RANK = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH, Verdict.INCONCLUSIVE, Verdict.ERROR)


def signature(report: Report) -> dict[str, Any]:
    """Return what must be equal for two audits to be comparable.

    That is the model, the weights, the reference's backend, dtype, device and settings, and every token of every probe.
    Releases of packages are left out, because comparing a new release with an old one is the purpose of a baseline.
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


def with_baseline_comparison(report: Report, earlier: Report) -> Report:
    """Return the report with its comparison to an earlier report, and with the exit code that follows.

    The exit code becomes 3 if the two audits asked different questions. It becomes 1 if it was 0 and a verdict changed, a
    candidate is missing from one of the audits, or a figure left its band.
    """
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
    """Return the names of the entries in which two signatures differ.

    A probe whose tokens were not recorded counts as different, because nothing shows that it is the same probe.
    """
    unknown = {
        name for side in (before, now) for name, value in side.items() if name.startswith("probe") and value[1] is None
    }
    differing = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return tuple(dict.fromkeys([*differing, *sorted(unknown)]))


def name_of(candidate: Candidate) -> str:
    """Return the candidate's backend and settings as one name, without its release, which may differ from the baseline's."""
    settings = ",".join(f"{key}={value}" for key, value in sorted(candidate.settings.items()))
    return f"{candidate.backend},{settings}" if settings else candidate.backend


def _pairs(
    now: Sequence[Candidate], before: Sequence[Candidate]
) -> Iterator[tuple[str, Candidate | None, Candidate | None]]:
    """Yield the name of every candidate, and the candidate in each audit (None where an audit does not have it).

    Releases are not part of the name. If an audit has several candidates of one name, the n-th of them is compared with the
    n-th of the other audit.
    """
    ours, theirs = _numbered(now), _numbered(before)
    for name in dict.fromkeys([*theirs, *ours]):
        yield name, ours.get(name), theirs.get(name)


def _numbered(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return the candidates by name; the second candidate of a name is called "name #2", and so on."""
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
    """Compare one figure of both audits.

    Equal values are within the band, zeros included. If only one of the two values is zero, there is no ratio, and the
    figure is outside its band.
    """
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
    """Yield one line of text for every verdict that changed, every missing candidate and every figure outside its band."""
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
