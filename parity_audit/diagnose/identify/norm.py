"""Normalisation: kind, offset of the weight, and eps, from what goes in and what comes out.

    out_d = W_d (x_d - mu) / sqrt(m + eps) + B_d

RMS: mu = 0, m = mean x^2, B = 0. LayerNorm: mu the mean, m the variance. W = offset + w with w the checkpoint's.
Kind: W (and B) free per component, by least squares over tokens; the kind with clearly less left over wins.
Offset: mean of W - w. Eps: with W known, each token's gain G = sum_d (out W x) / sum_d (W x)^2 is
1 / sqrt(m + eps), so eps = 1/G^2 - m. Rounding moves G by a relative 1e-7 and eps by m times as much, so
only tokens with small m can tell; the standard error says whether they can, and includes a common
relative error of the gain (the weight and the reductions round the same way in every token), which grows
with what the dtype leaves unexplained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread

EPS, OFFSET, KIND = "norm.eps", "norm.offset", "norm.kind"
TOKENS = 256
CLEAR = 4.0
EXPLAINED = 0.05
COMMON_ERROR = 2.0**-26
COMMON_SHARE = 0.2
TELLS = 0.3


@dataclass(frozen=True, kw_only=True)
class Norm:
    """One norm: tokens in and out `[token d_model]` and the checkpoint's weight and bias, if any."""

    site: str
    x: Tensor
    out: Tensor
    w: Tensor | None
    b: Tensor | None


def fit(evidence: Evidence) -> list[Outcome]:
    """norm.kind, norm.offset and norm.eps of every norm of the block (or of the final norm)."""
    outcomes: list[Outcome] = []
    for norm in norms_of(evidence):
        outcomes += fit_norm(evidence, norm)
    return outcomes


def norms_of(evidence: Evidence) -> Iterator[Norm]:
    """The norms whose input and output are visible."""
    last = evidence.dims["n_layers"] - 1
    places = {
        "ln1.out": ("resid_pre", "norm.ln1"),
        "ln1_post.out": ("attn_proj", "norm.ln1_post"),
        "ln2.out": ("resid_mid", "norm.ln2"),
        "ln2_post.out": ("mlp_proj", "norm.ln2_post"),
    } if evidence.layer is not None else {"ln_final.out": (f"blocks.{last}.resid_post", "norm.final")}  # fmt: skip
    for out, (into, role) in places.items():
        tokens = _tokens(evidence, into, out)
        if tokens is not None:
            weight, bias = evidence.weight(role), evidence.weight(f"{role}.bias")
            yield Norm(
                site=out, x=tokens[0], out=tokens[1], w=None if weight is None else f64(weight),
                b=None if bias is None else f64(bias),
            )  # fmt: skip


def _tokens(evidence: Evidence, into: str, out: str) -> tuple[Tensor, Tensor] | None:
    pairs = []
    for probe in evidence.short_probes():
        x, y = evidence.tensor(probe.name, into), evidence.tensor(probe.name, out)
        if x is not None and y is not None:
            kept = real(probe)
            pairs.append((x[kept], y[kept]))
    if not pairs:
        return None
    x, y = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    chosen = spread(x.shape[0], TOKENS)
    return f64(x[chosen]), f64(y[chosen])


def centred(x: Tensor, kind: str) -> Tensor:
    """x, or x minus its mean over d_model for LayerNorm."""
    return x - x.mean(-1, keepdim=True) if kind == "layer" else x


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A norm of one kind with W, B and a gain per token free: W up to a common factor, and what is left over."""

    weight: Tensor
    left: float


def _shape(norm: Norm, kind: str) -> Shape:
    """Alternate least squares of W (and B) over tokens and of the gain over components; three rounds settle it."""
    x, out = centred(norm.x, kind), norm.out
    gain = (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
    for _ in range(3):
        unit = x * gain
        weight = _slope(unit, out, kind)
        shift = (out - unit * weight).mean(0) if kind == "layer" else torch.zeros_like(weight)
        gain = ((out - shift) * weight * x).sum(-1, keepdim=True) / (weight * x).square().sum(-1, keepdim=True)
    return Shape(weight=weight, left=relative_rms(out - x * gain * weight - shift, out))


def _slope(unit: Tensor, out: Tensor, kind: str) -> Tensor:
    if kind == "layer":
        unit, out = unit - unit.mean(0), out - out.mean(0)
    return (unit * out).sum(0) / unit.square().sum(0).clamp_min(1e-300)


def fit_norm(evidence: Evidence, norm: Norm) -> list[Outcome]:
    """The three knobs of one norm."""
    shapes = {kind: _shape(norm, kind) for kind in ("rms", "layer")}
    left = {kind: shape.left for kind, shape in shapes.items()}
    kind = min(left, key=lambda name: left[name])
    other = max(left, key=lambda name: left[name])
    if left[kind] > EXPLAINED:
        why = f"neither norm explains {norm.site}: {left[kind]:.2g} left"
        return [gap(evidence, knob, why) for knob in (KIND, OFFSET, EPS)]
    outcomes: list[Outcome] = []
    if left[other] < CLEAR * left[kind]:
        kind = str(evidence.spec_value(KIND) or "rms")
        outcomes.append(gap(evidence, KIND, f"inputs of {norm.site} have no mean: both kinds leave {left[kind]:.1e}"))
    else:
        outcomes.append(KnobFit(
            knob=KIND, layer=evidence.layer, value=kind, stderr=None, residual=left[kind], n=norm.x.numel(),
            site=norm.site, evidence={"left_over": left},
        ))  # fmt: skip
    if norm.w is None:
        return [*outcomes, *(gap(evidence, k, f"no checkpoint weight for {norm.site}") for k in (OFFSET, EPS))]
    return [*outcomes, *_offset_and_eps(evidence, norm, kind, shapes[kind])]


def _offset_and_eps(evidence: Evidence, norm: Norm, kind: str, shape: Shape) -> list[Outcome]:
    assert norm.w is not None
    x = centred(norm.x, kind)
    out = norm.out - (norm.b if norm.b is not None and kind == "layer" else 0.0)
    offset, error, left = _offset(shape.weight, norm.w)
    if left > EXPLAINED:
        why = f"the weight of {norm.site} is not the checkpoint's plus a constant: {left:.2g} left"
        return [gap(evidence, knob, why) for knob in (OFFSET, EPS)]
    known = norm.w + (round(offset) if abs(offset - round(offset)) < 0.01 else offset)
    return [
        KnobFit(knob=OFFSET, layer=evidence.layer, value=offset, stderr=error, residual=shape.left,
                n=norm.w.numel(), site=norm.site),
        _eps(evidence, norm, x, out, known, shape.left),
    ]  # fmt: skip


def _offset(weight: Tensor, w: Tensor) -> tuple[float, float, float]:
    """(offset, standard error, relative rest) of W ~ s (offset + w); s = 1 when w is constant.

    The common factor s is not a weight fault: an unknown eps leaves it open.
    """
    spreading = float(w.std())
    if spreading < 1e-3 * float(w.abs().max()):
        difference = weight - w
        return float(difference.mean()), float(difference.std()), relative_rms(difference - difference.mean(), weight)
    dw = w - w.mean()
    s = float((dw * weight).sum() / dw.square().sum())
    if abs(s) < 1e-6:
        return 0.0, 0.0, 1.0
    rest = weight / s - w
    # Rounding of 1 + w is biased component by component, so the spread itself is the error, not spread/sqrt(n).
    return float(rest.mean()), float(rest.std()), relative_rms(rest - rest.mean(), weight / s)


def _eps(evidence: Evidence, norm: Norm, x: Tensor, out: Tensor, weight: Tensor, left: float) -> Outcome:
    """Weighted mean of 1/G^2 - m over tokens, weight 1/m^2 because its rounding error grows with m."""
    m = x.square().mean(-1)
    total = m
    for _ in range(2):  # the error of 1/G^2 scales with m + eps, which the first round estimates
        gain = (out * weight * x).sum(-1) / (weight * x).square().sum(-1)
        each = gain.abs().clamp_min(1e-300).pow(-2) - m
        trust = total.clamp_min(1e-300).pow(-2)
        eps = float((each * trust).sum() / trust.sum())
        total = m + max(eps, 0.0)
    scatter = float((trust * (each - eps)).square().sum().sqrt() / trust.sum())
    common = 2 * max(COMMON_ERROR, COMMON_SHARE * left) * float((trust * total).sum() / trust.sum())
    stderr = (scatter**2 + common**2) ** 0.5
    expected = evidence.spec_number(EPS, 0.0)
    if stderr > TELLS * max(abs(eps), expected):
        why = f"inputs of {norm.site} are too large to show it: {eps:.2g} +- {stderr:.2g}"
        return gap(evidence, EPS, why)
    return KnobFit(
        knob=EPS, layer=evidence.layer, value=eps, stderr=stderr, residual=left, n=m.numel(), site=norm.site,
        evidence={"smallest_mean_square": float(m.min())},
    )  # fmt: skip
