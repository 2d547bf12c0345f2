"""From a fitted law of attention to attention.scale, .softcap, .alibi and .sinks.

The scale reported is the divisor of q.k: scores = q.k / scale. Where a port puts it on q instead, q grows by it on
the way to the scores (`rotary_turns.q_over_k`) and the product is what counts. A cap before the scale,
s = c cap tanh(q.k / cap), is the same curve as a cap of c cap after it, and is reported as that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import POINTS, Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.attention.saturation import cap_fit
from parity_audit.diagnose.identify.attention.softmax import sinks_fit
from parity_audit.diagnose.identify.attention.visible import CAP, SCALE, Bend
from parity_audit.diagnose.identify.rotary.turns import q_over_k
from parity_audit.diagnose.thresholds import ALIKE, SIGMAS
from parity_audit.formulas.alibi import standard_slopes

ALIBI = "attention.alibi"


def law_knobs(evidence: Evidence, bend: Bend) -> list[Outcome]:
    """The knobs of a law that explains what it was fitted to, and more of it than the spec's law does."""
    if not bend.tells:
        why = f"the spec's law leaves {bend.by_spec:.2g} of z and the best one {bend.residual:.2g}: something else is wrong"
        return [gap(evidence, knob, why) for knob in (SCALE, CAP, ALIBI)]
    outcomes = [_scale(evidence, bend), _cap(evidence, bend), _alibi(evidence, bend)]
    if bend.site == "z":
        sinks, errors = _sink_logits(bend)
        outcomes.append(sinks_fit(evidence, sinks, errors, bend.residual, bend.n, "z"))
    return outcomes


def _scale(evidence: Evidence, bend: Bend) -> Outcome:
    ratio = q_over_k(evidence)
    slope, error = bend.law.slope * ratio, bend.slope_stderr * ratio
    if bool((slope <= 0).any()):
        return gap(evidence, SCALE, "the fitted slope is not positive")
    value, stderr = _one_of(1 / slope, error / slope.square(), shared=bend.estimate is not None)
    facts: dict[str, object] = {"slope": slope.tolist() if isinstance(value, list) else float(slope[0])}
    facts |= {POINTS: [list(point) for point in bend.points]} if bend.points else {}
    if ratio != 1.0:
        facts["of_which_on_q"] = ratio
    return KnobFit(knob=SCALE, layer=evidence.layer, value=value, stderr=stderr, residual=bend.residual, n=bend.n,
                   site=bend.site, evidence=facts)  # fmt: skip


def _one_of(value: Tensor, stderr: Tensor, *, shared: bool) -> tuple[KnobValue, float | None]:
    """One number for all heads where their errors allow it, else a list."""
    if shared:
        return float(value[0]), float(stderr[0])
    weight = stderr.clamp_min(1e-12 * value.abs()).pow(-2)
    mean = (value * weight).sum() / weight.sum()
    apart = (value - mean).abs() > torch.maximum(SIGMAS * stderr, ALIKE * mean)
    if bool(apart.any()):
        return [float(f"{one:.6g}") for one in value.tolist()], None
    return float(mean), float(weight.sum().rsqrt())


def _cap(evidence: Evidence, bend: Bend) -> Outcome:
    if bend.estimate is None:
        return gap(evidence, CAP, "not fitted where heads have laws of their own (ALiBi, sinks)")
    cap = cap_fit(
        CAP, evidence.layer, bend.estimate, residual=bend.residual, site=bend.site, spec_cap=evidence.spec_value(CAP)
    )
    if isinstance(cap, KnobFit) and isinstance(cap.value, float):
        cap.evidence[POINTS] = [list(point) for point in bend.points]
        cap.evidence["a_cap_before_the_scale_of"] = cap.value / float(bend.law.slope[0])
    return gap(evidence, CAP, cap) if isinstance(cap, str) else cap


def _alibi(evidence: Evidence, bend: Bend) -> KnobFit:
    slopes, errors = bend.law.alibi, bend.alibi_stderr
    tilted = errors is not None and bool((slopes.abs() > SIGMAS * errors).any())
    facts: dict[str, object] = {"n_heads": len(slopes), "stderrs": [] if errors is None else errors.tolist()}
    value: KnobValue = None
    if tilted:
        value = [float(f"{slope:.8g}") for slope in slopes.tolist()]
        usual = torch.tensor(standard_slopes(len(slopes)), dtype=torch.float64)
        facts["times_the_usual_slopes"] = (slopes / usual).tolist()
    return KnobFit(knob=ALIBI, layer=evidence.layer, value=value, stderr=None, residual=bend.residual, n=bend.n,
                   site=bend.site, evidence=facts)  # fmt: skip


def _sink_logits(bend: Bend) -> tuple[list[float] | None, list[float]]:
    """log of the fitted e^sink, and its error."""
    if bend.sink_stderr is None:
        return None, []
    sink = bend.law.sink.clamp_min(1e-300)
    return sink.log().tolist(), (bend.sink_stderr / sink).tolist()
