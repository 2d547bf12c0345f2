"""Normalisation: kind, whose weight and bias, offset of the weight, eps and its place, and the arithmetic.

    out_d = W_d (x_d - mu) / sqrt(m + eps) + B_d

RMS: mu = 0, m = mean x^2. LayerNorm: mu the mean, m the variance. `shape` finds the kind and W, B with a free
gain per token; `weight` compares those with the checkpoint's; `gain` reads eps (and where it stands) off
the gains; `dtype` asks whether a narrower dtype was at work. Kind: the one with clearly less left over wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from parity_audit.core.sites import BEFORE_BLOCKS, FINAL_NORM, NORM_ROLES, NORMS, final_norm_reads
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread
from parity_audit.diagnose.identify.norm.dtype import arithmetic, moved_by_rounding
from parity_audit.diagnose.identify.norm.gain import INSIDE, USUAL_SIZE, Gain, common_error, read_gain, size_by
from parity_audit.diagnose.identify.norm.order import ORDER, PLACES, USUAL_PLACE, elsewhere
from parity_audit.diagnose.identify.norm.shape import Norm, Shape, best_shape, gain_of
from parity_audit.diagnose.identify.norm.weight import Weight, whose_bias, whose_weight
from parity_audit.diagnose.thresholds import EXPLAINED
from parity_audit.formulas.norms import centred

TOKENS = 256
TELLS = 0.3
TOLD = 6.0
COPY = 1e-6
EVEN = 0.02
OF_THE_GAIN = ("eps", "eps_place", "gain", "dtype")
ALL = ("kind", "weight", "bias", "offset", "size", *OF_THE_GAIN)


def fit(evidence: Evidence) -> list[Outcome]:
    """The knobs of every norm of the block (or of those outside the blocks)."""
    others = {role: w for role in ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post")
              if (w := weight_of(evidence, role)) is not None}  # fmt: skip
    return [outcome for norm in norms_of(evidence) for outcome in fit_norm(evidence, norm, others)]


def norms_of(evidence: Evidence) -> Iterator[Norm]:
    """The norms whose input and output are visible."""
    outside = evidence.layer is None
    places = {site: inputs for site, (inputs, _) in NORMS.items() if (site in BEFORE_BLOCKS) == outside}
    if outside:
        places[FINAL_NORM] = final_norm_reads(evidence.dims["n_layers"])
    for out, inputs in places.items():
        tokens = next((found for into in inputs if (found := tokens_of(evidence, into, out)) is not None), None)
        if tokens is not None:
            role = NORM_ROLES[out]
            yield Norm(
                prefix="norm", site=out, x=tokens[0][:, None], out=tokens[1][:, None], w=weight_of(evidence, role),
                b=weight_of(evidence, f"{role}.bias"),
            )  # fmt: skip


def weight_of(evidence: Evidence, role: str) -> Tensor | None:
    """A norm's tensor of the checkpoint as one block `[1 d_model]`."""
    weight = evidence.weight(role)
    return None if weight is None else f64(weight).flatten()[None]


def tokens_of(evidence: Evidence, into: str, out: str, count: int = TOKENS) -> tuple[Tensor, Tensor] | None:
    """Real tokens of two sites, in float64, spread over the short probes."""
    pairs = []
    for probe in evidence.short_probes():
        x, y = evidence.tensor(probe.name, into), evidence.tensor(probe.name, out)
        if x is not None and y is not None:
            kept = real(probe)
            pairs.append((x[kept], y[kept]))
    if not pairs:
        return None
    x, y = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    chosen = spread(x.shape[0], count)
    return f64(x[chosen]), f64(y[chosen])


def fit_norm(
    evidence: Evidence, norm: Norm, others: Mapping[str, Tensor], found: tuple[Shape, bool] | None = None
) -> list[Outcome]:  # fmt: skip
    """The knobs of one norm; `others` are weights that may have been taken in place of its own.

    `found` is its best shape, where that is known already.
    """

    missing = partial(_missing, evidence, norm)
    if relative_rms(norm.out - norm.x, norm.x) < COPY:
        skipped = KnobFit(knob=f"{norm.prefix}.kind", layer=evidence.layer, value="none", stderr=None, residual=0.0,
                          n=norm.x.numel(), site=norm.site)  # fmt: skip
        return [skipped, *missing(ALL[1:], f"{norm.site} is its input unchanged")]
    shape, told = found or best_shape(norm)
    place = elsewhere(evidence, norm, shape.left)
    if place is not None:
        order = KnobFit(knob=ORDER, layer=evidence.layer, value=place[0], stderr=None, residual=place[1], n=norm.x.numel(),
                        site=norm.site)  # fmt: skip
        return [order, *missing(ALL, f"{norm.site} is a norm {place[0]}")]
    if shape.left > EXPLAINED:
        return missing(ALL, f"neither norm explains {norm.site}: {shape.left:.2g} left")
    if not shape.settled:
        return missing(ALL, f"the fit of {norm.site} has not converged: nothing is claimed ({shape.left:.2g} left)")
    outcomes: list[Outcome] = [_say(evidence, norm, "order", USUAL_PLACE, shape)] if norm.site in PLACES else []
    if told:
        outcomes.append(_say(evidence, norm, "kind", shape.kind, shape))
    else:
        why = f"inputs of {norm.site} have no mean: both kinds leave {shape.left:.1e}"
        outcomes += missing(("kind",), why)
    weight = whose_weight(norm, shape, others)
    outcomes.append(_say(evidence, norm, "weight", weight.whose, shape))
    bias = whose_bias(norm, shape)
    outcomes += [_say(evidence, norm, "bias", bias, shape)] if bias else missing(("bias",), "too small to show")
    if weight.offset is not None:
        outcomes.append(_say(evidence, norm, "offset", weight.offset[0], shape, weight.offset[1]))
    if weight.known is None:
        return [*outcomes, *missing(ALL[3:], f"the weight of {norm.site} is {weight.whose}")]
    return outcomes + _gain_knobs(evidence, norm, shape, weight)


def _missing(evidence: Evidence, norm: Norm, knobs: tuple[str, ...], why: str) -> list[Outcome]:
    return [gap(evidence, f"{norm.prefix}.{knob}", why) for knob in knobs]


def _gain_knobs(evidence: Evidence, norm: Norm, shape: Shape, weight: Weight) -> list[Outcome]:
    assert weight.known is not None
    x = centred(norm.x, shape.kind)
    m = x.square().mean(-1, keepdim=True)
    shift = torch.zeros(()) if shape.bias is None else shape.bias
    weighted = weight.known * x
    gain = gain_of(norm.out - shift, weighted)
    found = read_gain(m, gain, shape.left)
    size = size_by(x, gain, found, shape.left)
    if size != USUAL_SIZE:
        why = f"{norm.site} divides by the {size} of its inputs"
        return [_say(evidence, norm, "size", size, shape), *_missing(evidence, norm, OF_THE_GAIN, why)]
    if found.scatter > max(EVEN, 30 * common_error(shape.left)):
        why = f"the gains of {norm.site} do not follow its inputs: {found.scatter:.2g} left"
        return _missing(evidence, norm, OF_THE_GAIN, why)
    expected = evidence.spec_number(f"{norm.prefix}.eps", 0.0)
    rounding = moved_by_rounding(
        norm, shape.kind, weight.known, shift, expected,
        lambda out: read_gain(m, gain_of(out - shift, weighted), shape.left).eps,
    )  # fmt: skip
    outcomes = [
        _say(evidence, norm, "size", size, shape),
        _eps(evidence, norm, found, shape, rounding),
        _dtype(evidence, norm, shape, weight, found),
    ]
    if found.told:
        outcomes.append(_say(evidence, norm, "eps_place", found.form, shape))
    outcomes.append(KnobFit(
        knob=f"{norm.prefix}.gain", layer=evidence.layer, value=found.gain, stderr=common_error(shape.left),
        residual=shape.left, n=m.numel(), site=norm.site, evidence=_names_of(found.gain, norm.x.shape[-1]),
    ))  # fmt: skip
    return outcomes


def _names_of(gain: float, size: int) -> dict[str, str]:
    """What a factor usually comes from."""
    sources = {"a variance divided by n - 1": ((size - 1) / size) ** 0.5, "a sum in place of the mean": size**-0.5}
    near = [name for name, value in sources.items() if abs(gain / value - 1) < 0.2 * abs(value - 1)]
    return {"as_from": near[0]} if near else {}


def _eps(evidence: Evidence, norm: Norm, found: Gain, shape: Shape, rounding: float) -> Outcome:
    knob = f"{norm.prefix}.eps"
    expected = evidence.spec_number(knob, 0.0)
    error = math.hypot(found.stderr, rounding)
    if error > TELLS * max(abs(found.eps), expected):
        why = f"inputs of {norm.site} are too large to show it: {found.eps:.2g} +- {error:.2g}"
        return gap(evidence, knob, why)
    return KnobFit(
        knob=knob, layer=evidence.layer, value=found.eps, stderr=error, residual=shape.left,
        n=norm.x.shape[0], site=norm.site, evidence={"place": found.form},
    )  # fmt: skip


def _dtype(evidence: Evidence, norm: Norm, shape: Shape, weight: Weight, found: Gain) -> Outcome:
    knob = f"{norm.prefix}.dtype"
    assert weight.known is not None
    bias = None if shape.bias is None else norm.b if norm.b is not None else shape.bias
    eps = evidence.spec_number(f"{norm.prefix}.eps", 0.0)
    if abs(eps - found.eps) > TOLD * found.stderr:
        eps = found.eps
    if found.form != INSIDE:
        return gap(evidence, knob, f"recomputed for eps inside the root only, not {found.form}")
    try:
        value, left = arithmetic(norm, shape.kind, weight.known * found.gain, bias, eps)
    except ValueError as error:
        return gap(evidence, knob, str(error))
    shown = dict(sorted(left.items(), key=lambda item: item[1])[:3])
    return _say(evidence, norm, "dtype", value, shape, evidence_of={"left_over": shown})


def _say(
    evidence: Evidence, norm: Norm, knob: str, value: KnobValue, shape: Shape, stderr: float | None = None,
    evidence_of: dict[str, object] | None = None,
) -> KnobFit:  # fmt: skip
    return KnobFit(
        knob=f"{norm.prefix}.{knob}", layer=evidence.layer, value=value, stderr=stderr, residual=shape.left,
        n=norm.out.numel(), site=norm.site, evidence=evidence_of or {},
    )  # fmt: skip
