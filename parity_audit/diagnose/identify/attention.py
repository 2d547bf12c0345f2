"""Attention scale, soft-cap and window, together: each hides the others when fitted alone.

Scores visible: `saturation.fit_curve` on (q.k, score) pairs, masked entries left out, so no window can
disturb it. Hidden: synthesis on z in three steps: (1) slope and cap from the first few queries, which every
window sees whole; (2) the window from later queries; (3) slope and cap again from queries everywhere.
The scale reported is the divisor: scores = q.k / scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap, spread
from parity_audit.diagnose.identify.attention_mask import mask_from_scores
from parity_audit.diagnose.identify.attention_rows import (
    Row,
    attention_rows,
    dot_products,
    visible_scores,
    with_padding,
)
from parity_audit.diagnose.identify.head_map import head_map
from parity_audit.diagnose.identify.least_squares import Estimate
from parity_audit.diagnose.identify.saturation import Pairs, cap_fit, fit_curve
from parity_audit.diagnose.identify.synthesis import fit_synthesis, queries_of, size_of, unexplained
from parity_audit.diagnose.identify.window import (
    Reach,
    joined,
    late_queries,
    reach_from_scores,
    reach_from_z,
    window_fit,
)

SCALE, CAP, WINDOW, MASK = "attention.scale", "attention.softcap", "attention.window", "attention.mask"
EARLY = (8, 3, 2)
QUERIES = 16
EXPLAINED = 0.05


@dataclass(frozen=True, kw_only=True)
class Bend:
    """Fitted slope and w, what they leave unexplained, and the site they were read from."""

    estimate: Estimate
    residual: float
    site: str


def fit(evidence: Evidence) -> list[Outcome]:
    """attention.scale, attention.softcap, attention.window and attention.mask of one layer."""
    if evidence.layer is None:
        return []
    rows = list(attention_rows(evidence, evidence.short_probes()))
    if not rows:
        return [gap(evidence, knob, "rotated q and k are not visible") for knob in (SCALE, CAP, WINDOW)]
    heads = head_map(evidence)
    reaches = [reach for row in rows if (reach := reach_from_scores(evidence, row)) is not None]
    bend = _bend_from_scores(evidence, rows, heads)
    outcomes: list[Outcome] = []
    if bend is not None:
        outcomes.append(mask_from_scores(evidence))
    else:
        bend, reaches, mask = _bend_from_z(evidence, rows, heads)
        outcomes.append(mask)
    if bend is None or bend.residual > EXPLAINED:
        why = "no scale, soft-cap and window explain " + ("the scores" if bend and bend.site == "attn_scores" else "z")
        return [*outcomes, *(gap(evidence, knob, why) for knob in (SCALE, CAP)), window_fit(evidence, reaches)]
    reaches = reaches + _long_reaches(evidence, heads, bend)
    return [*outcomes, *_knobs(evidence, bend), window_fit(evidence, reaches)]


def _bend_from_scores(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]) -> Bend | None:
    pairs: Pairs = []
    for row in rows:
        scores = visible_scores(evidence, row)
        if scores is None:
            continue
        y = dot_products(row, heads, torch.arange(row.length), row.length)
        mask = torch.isfinite(scores)
        pairs.append((y.flatten(0, 1), scores.masked_fill(~mask, 0.0).flatten(0, 1), mask.flatten(0, 1)))
    estimate = fit_curve(pairs) if pairs else None
    if estimate is None:
        return None
    size = sum(float(s.square().sum()) for _, s, _ in pairs) ** 0.5
    return Bend(estimate=estimate, residual=estimate.squares**0.5 / size, site="attn_scores")


def _bend_from_z(
    evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]
) -> tuple[Bend | None, list[Reach], Outcome]:
    """The three steps of the module docstring; the mask verdict falls out of which of them succeeds."""
    whole_rows = [row for row in rows if row.z is not None and row.v is not None and row.length > 2]
    # Right padding is behind every causal query; left padding is judged apart, in case it is not masked.
    shown = [row for row in whole_rows if int(row.kept[0]) == 0] or whole_rows
    for early in EARLY:
        first = _synthesis(evidence, shown, heads, [torch.arange(1, min(early, row.length)) for row in shown], None)
        if first is not None and first.residual <= EXPLAINED:
            slope, w = first.estimate.value.tolist()
            queries = [spread(row.length - 1, QUERIES) + 1 for row in shown]
            pairs = zip(shown, queries, strict=True)
            reaches = [r for row, at in pairs if (r := reach_from_z(row, heads, slope, w, at)) is not None]
            whole = joined(reaches) if len(reaches) == len(shown) else None
            if whole is None:
                return first, reaches, gap(evidence, MASK, "a causal mask explains the first queries only")
            window = None if whole.high == float("inf") else int(whole.best)
            last = _synthesis(evidence, shown, heads, queries, window, start=first)
            bend = last or first
            left_padded = [row for row in whole_rows if int(row.kept[0]) > 0]
            mask = padding_fault(evidence, left_padded, heads, bend, window)
            return bend, reaches, _mask_verdict(evidence, bend, mask)
    everything = [spread(row.length, QUERIES) for row in shown]
    blind = _synthesis(evidence, shown, heads, everything, None, future=True)
    if blind is not None and blind.residual <= EXPLAINED:
        return blind, [], _mask_verdict(evidence, blind, "not causal")
    return None, [], gap(evidence, MASK, "no mask explains z")


def padding_fault(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], bend: Bend, window: int | None) -> str:
    """ "causal" when rows with left padding are explained without it; what is wrong otherwise."""
    for row in rows:
        at = torch.arange(1, row.length)
        if unexplained(queries_of(row, heads, at, window), bend.estimate.value) > EXPLAINED:
            whole = with_padding(evidence, row)
            seen = unexplained(queries_of(whole, heads, row.kept[1:], window), bend.estimate.value)
            return "sees padding" if seen <= EXPLAINED else "wrong where a row is left-padded"
    return "causal"


def _synthesis(
    evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], queries: Sequence[torch.Tensor],
    window: int | None, *, future: bool = False, start: Bend | None = None,
) -> Bend | None:  # fmt: skip
    pairs = zip(rows, queries, strict=True)
    parts = [queries_of(row, heads, at, window, future=future) for row, at in pairs if at.numel()]
    if not parts:
        return None
    slope = 1.0 / evidence.spec_number(SCALE, evidence.dims["d_head"] ** 0.5)
    cap = evidence.spec_value(CAP)
    caps = [float(cap)] if isinstance(cap, (int, float)) and cap else []
    estimate = fit_synthesis(parts, slope, caps, None if start is None else start.estimate.value)
    if estimate is None:
        return None
    return Bend(estimate=estimate, residual=estimate.squares**0.5 / size_of(parts), site="z")


def _mask_verdict(evidence: Evidence, bend: Bend, value: str) -> KnobFit:
    return KnobFit(
        knob=MASK, layer=evidence.layer, value=value, stderr=None, residual=bend.residual, n=bend.estimate.n, site="z"
    )


def _long_reaches(evidence: Evidence, heads: Sequence[int], bend: Bend) -> list[Reach]:
    """Reaches on probes that are longer than any probe whose scores fit in memory."""
    slope, w = bend.estimate.value.tolist()
    reaches = []
    for probe in evidence.probes:
        if probe.sites == "all":
            continue
        for row in attention_rows(evidence, [probe]):
            reach = reach_from_z(row, heads, slope, w, late_queries(row.length))
            if reach is not None:
                reaches.append(reach)
    return reaches


def _knobs(evidence: Evidence, bend: Bend) -> list[Outcome]:
    estimate = bend.estimate
    slope, slope_stderr = float(estimate.value[0]), float(estimate.stderr[0])
    scale: Outcome = KnobFit(
        knob=SCALE, layer=evidence.layer, value=1 / slope, stderr=slope_stderr / slope**2, residual=bend.residual,
        n=estimate.n, site=bend.site, evidence={"slope": slope, "slope_stderr": slope_stderr},
    ) if slope > 0 else gap(evidence, SCALE, "the fitted slope is not positive")  # fmt: skip
    cap = cap_fit(
        CAP, evidence.layer, estimate, residual=bend.residual, site=bend.site, spec_cap=evidence.spec_value(CAP)
    )
    return [scale, gap(evidence, CAP, cap) if isinstance(cap, str) else cap]
