"""From scores to pattern: sinks, temperature, and the arithmetic of the softmax.

    p_ij = e^{c s_ij} / (sum_j e^{c s_ij} + e^{sink})

Rows of the pattern that sum to S < 1 have lost the rest to a sink: sink = log((1 - S) / S) + log sum_j e^{s_ij}, one
number per head. A sink of 0 in every head is "softmax off by one". c is 1 unless the softmax runs at another
temperature; it is the slope of log p over s within a row. What is left is rounding, or not a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, relative_rms
from parity_audit.diagnose.identify.attention.rows import Row, visible_scores
from parity_audit.diagnose.identify.least_squares import ratio
from parity_audit.diagnose.identify.rounding import best_of
from parity_audit.diagnose.thresholds import EXPLAINED
from parity_audit.formulas.attention import narrow_softmax, softmax
from parity_audit.formulas.knobs import FULL, KNOBS
from parity_audit.formulas.rounding import NARROW, any_narrow, representable

SINKS, TEMPERATURE, DTYPE = "attention.sinks", "attention.temperature", "attention.softmax_dtype"
OWN, OFF_BY_ONE = "the checkpoint's", "0 in every head (softmax off by one)"
LOST = 2.0**-10
NEAR = 0.02
SHOWS = 1e-6


def fit_softmax(evidence: Evidence, rows: Sequence[Row]) -> list[Outcome]:
    """The three knobs; gaps where scores or pattern are hidden."""
    seen = [(s, p) for row in rows if (s := visible_scores(evidence, row)) is not None
            and (p := _pattern(evidence, row)) is not None]  # fmt: skip
    if not seen:
        return [gap(evidence, knob, "scores and pattern are not both visible") for knob in (TEMPERATURE, DTYPE)]
    s, p = _stacked([s for s, _ in seen], -torch.inf), _stacked([p for _, p in seen], 0.0)
    temperature, error = _temperature(s, p)
    hot = temperature * s
    sinks = _sinks(hot, p)
    made = softmax(hot, sinks)
    left = relative_rms(made - p, p)
    if left > EXPLAINED:
        why = f"the pattern is no softmax of the scores: {left:.2g} left"
        return [gap(evidence, knob, why) for knob in (SINKS, TEMPERATURE, DTYPE)]

    def said(knob: str, value: KnobValue, stderr: float | None = None, **facts: object) -> KnobFit:
        return KnobFit(knob=knob, layer=evidence.layer, value=value, stderr=stderr, residual=left, n=p.numel(),
                       site="pattern", evidence=dict(facts))  # fmt: skip

    return [
        sinks_fit(evidence, None if sinks is None else sinks.tolist(), _spread(hot, p, sinks), left, p.numel(), "pattern"),
        said(TEMPERATURE, temperature, error),
        _dtype(evidence, rows, (hot, p, _own_where_alike(evidence, sinks)), said),
    ]  # fmt: skip


def sinks_fit(
    evidence: Evidence, sinks: list[float] | None, stderrs: list[float], left: float, n: int, site: str
) -> KnobFit:  # fmt: skip
    """Sinks in words where they are the checkpoint's or all 0, else as a list."""
    weight = evidence.weight("attn.sinks")
    value: KnobValue = sinks
    if sinks is not None:
        own = None if weight is None else f64(weight).flatten()
        if own is not None and own.numel() == len(sinks) and _close(sinks, own.tolist(), stderrs):
            value = OWN
        elif _close(sinks, [0.0] * len(sinks), stderrs):
            value = OFF_BY_ONE
    return KnobFit(knob=SINKS, layer=evidence.layer, value=value, stderr=None, residual=left, n=n, site=site,
                   evidence={"sinks": sinks, "stderrs": stderrs})  # fmt: skip


def _own_where_alike(evidence: Evidence, sinks: Tensor | None) -> Tensor | None:
    """The checkpoint's sinks where the fitted ones are those: free of the noise of the fit."""
    weight = evidence.weight("attn.sinks")
    if sinks is None or weight is None or weight.numel() != sinks.numel():
        return sinks
    own = f64(weight).flatten()
    return own if float((own - sinks).abs().max()) <= NEAR else sinks


def _close(a: Sequence[float], b: Sequence[float], errors: Sequence[float]) -> bool:
    return all(abs(x - y) <= max(NEAR, 6 * error) for x, y, error in zip(a, b, errors, strict=True))


def _pattern(evidence: Evidence, row: Row) -> Tensor | None:
    """`[head query key]` of real tokens; None where it is hidden, or where padding takes a share that is no sink's."""
    pattern = evidence.tensor(row.probe, "pattern")
    if pattern is None:
        return None
    whole = f64(pattern[row.batch][:, row.kept])
    own = whole[:, :, row.kept]
    return own if float((whole.sum(-1) - own.sum(-1)).abs().max()) < LOST else None


def _stacked(parts: Sequence[Tensor], fill: float) -> Tensor:
    """All query rows `[head row key]`, keys padded to the longest."""
    longest = max(part.shape[-1] for part in parts)
    return torch.cat([torch.nn.functional.pad(t, (0, longest - t.shape[-1]), value=fill) for t in parts], 1)


def _temperature(s: Tensor, p: Tensor) -> tuple[float, float]:
    """The slope of log p over s within rows, weighted by p: entries of no weight say nothing."""
    use = torch.isfinite(s) & (p > SHOWS)
    weight = torch.where(use, p, 0.0)
    total = weight.sum(-1, keepdim=True).clamp_min(1e-300)
    x, y = torch.where(use, s, 0.0), torch.where(use, p.clamp_min(1e-300).log(), 0.0)
    x, y = (torch.where(use, t - (weight * t).sum(-1, keepdim=True) / total, 0.0) for t in (x, y))
    if float((weight * x * x).sum()) == 0.0:
        return 1.0, 0.0
    found = ratio(x.flatten(0, 1), y.flatten(0, 1), weight.flatten(0, 1))
    value, error = float(found.value[0]), float(found.stderr[0])
    return (1.0 if abs(value - 1) < max(1e-6, 8 * error) else value), error


def _sinks(s: Tensor, p: Tensor) -> Tensor | None:
    """One logit per head, from the rows that show it best; None where nothing is lost."""
    if float((1 - p.sum(-1)).mean()) < (16 * LOST if any_narrow(p) else LOST):
        return None
    each, weight = _logits(s, p).nan_to_num(neginf=0.0), _weights(p)
    return (each * weight).sum(-1) / weight.sum(-1).clamp_min(1e-300)


def _logits(s: Tensor, p: Tensor) -> Tensor:
    total = p.sum(-1).clamp(1e-12, 1 - 1e-12)
    return torch.log((1 - total) / total) + torch.logsumexp(s, -1)


def _weights(p: Tensor) -> Tensor:
    """S (1 - S): where all or nothing is lost, rounding decides."""
    total = p.sum(-1).clamp(0.0, 1.0)
    return (total * (1 - total)).square()


def _spread(s: Tensor, p: Tensor, sinks: Tensor | None) -> list[float]:
    if sinks is None:
        return []
    weight = _weights(p)
    variance = (weight.square() * (_logits(s, p) - sinks[:, None]).square()).sum(-1) / weight.sum(-1).square()
    return [float(error) for error in variance.sqrt()]


def _dtype(
    evidence: Evidence, rows: Sequence[Row], seen: tuple[Tensor, Tensor, Tensor | None], said: Callable[..., KnobFit]
) -> Outcome:  # fmt: skip
    """Recomputed with the rounding of a narrow dtype in each place; `seen` are scores, pattern and sinks."""
    s, p, sinks = seen
    exact = softmax(s, sinks)
    finite = torch.where(torch.isfinite(s), s, 0.0)
    for name, dtype in NARROW.items():
        if representable(finite, dtype):
            if representable(torch.cat([row.q.flatten() for row in rows[:3]]), dtype):
                return gap(evidence, DTYPE, "q is in a narrow dtype itself")
            return said(DTYPE, f"{name} throughout" if representable(p, dtype) else f"{name} scores")
    places = (value for value in KNOBS[DTYPE].choices if value != FULL)
    variants = {FULL: exact} | {value: narrow_softmax(s, sinks, value) for value in places}
    best, left = best_of(p, variants)
    return said(DTYPE, best, None, left_over=dict(sorted(left.items(), key=lambda item: item[1])[:3]))
