"""Normalisation: kind, offset of the weight, and eps, from what goes in and what comes out.

    out_d = W_d (x_d - mu) / sqrt(m + eps) + B_d

RMS: mu = 0, m = mean x^2, B = 0. LayerNorm: mu the mean, m the variance. W = offset + w with w the checkpoint's.
Kind: W (and B) free per component, by least squares over tokens; the kind with clearly less left over wins.
Offset: mean of W - w. Eps: with W known, each token's gain G = sum_d (out W x) / sum_d (W x)^2 is
1 / sqrt(m + eps), so eps = 1/G^2 - m. Rounding moves G by a relative 1e-7 and eps by m times as much, so
only tokens with small m can tell; the standard error says whether they can, and includes a common
relative error of the gain (constants and reductions round the same way in every token).
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


def _left_over(norm: Norm, kind: str) -> float:
    """Relative rms left with W (and B) free and eps started at 0, refined once through the gains."""
    x = centred(norm.x, kind)
    m = x.square().mean(-1, keepdim=True)
    gain = (m + 1e-12).rsqrt()
    out = norm.out
    for _ in range(3):
        unit = x * gain
        shift = out.mean(0) - unit.mean(0) * _slope(unit, out, kind) if kind == "layer" else torch.zeros_like(out[0])
        weight = _slope(unit, out, kind)
        gain = ((out - shift) * weight * x).sum(-1, keepdim=True) / (weight * x).square().sum(-1, keepdim=True)
    return relative_rms(out - x * gain * weight - shift, out)


def _slope(unit: Tensor, out: Tensor, kind: str) -> Tensor:
    if kind == "layer":
        unit, out = unit - unit.mean(0), out - out.mean(0)
    return (unit * out).sum(0) / unit.square().sum(0).clamp_min(1e-300)


def fit_norm(evidence: Evidence, norm: Norm) -> list[Outcome]:
    """The three knobs of one norm."""
    left = {kind: _left_over(norm, kind) for kind in ("rms", "layer")}
    kind = min(left, key=lambda name: left[name])
    other = max(left, key=lambda name: left[name])
    if left[kind] > EXPLAINED:
        return [gap(evidence, knob, f"neither norm explains {norm.site}: {left[kind]:.2g} left") for knob in (KIND, OFFSET, EPS)]
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
    return [*outcomes, *_offset_and_eps(evidence, norm, kind, left[kind])]


def _offset_and_eps(evidence: Evidence, norm: Norm, kind: str, left: float) -> list[Outcome]:
    assert norm.w is not None
    x = centred(norm.x, kind)
    m = x.square().mean(-1)
    out = norm.out - (norm.b if norm.b is not None and kind == "layer" else 0.0)
    eps = evidence.spec_number(EPS, 1e-6)
    weight = _slope(x * (m + eps).rsqrt()[:, None], out, "rms")
    size = float((weight * norm.w).sum() / weight.square().sum())
    offset, error = _offset_of(weight, norm.w)
    if relative_rms(weight - norm.w - offset, weight) > EXPLAINED:
        why = f"the weight of {norm.site} is not the checkpoint's plus a constant (slope {size:.3g})"
        return [gap(evidence, knob, why) for knob in (OFFSET, EPS)]
    known = norm.w + round(offset) if abs(offset - round(offset)) < 0.01 else norm.w + offset
    return [
        KnobFit(knob=OFFSET, layer=evidence.layer, value=float(offset), stderr=error, residual=left,
                n=weight.numel(), site=norm.site),
        _eps(evidence, norm, x, m, out, known, left),
    ]  # fmt: skip


def _offset_of(weight: Tensor, w: Tensor) -> tuple[float, float]:
    """Median of W - w (an eps far from the start value bends it by a common factor) and its error."""
    difference = weight - w
    offset = float(difference.median())
    spreading = float((difference - offset).abs().median())
    return offset, max(spreading, 1e-7 * float(weight.abs().max()))


def _eps(
    evidence: Evidence, norm: Norm, x: Tensor, m: Tensor, out: Tensor, weight: Tensor, left: float
) -> Outcome:
    """Weighted mean of 1/G^2 - m over tokens, weight 1/m^2 because its rounding error grows with m."""
    total = m.clone()
    for _ in range(2):  # the error of 1/G^2 scales with m + eps, which the first round estimates
        gain = (out * weight * x).sum(-1) / (weight * x).square().sum(-1)
        each = gain.abs().clamp_min(1e-300).pow(-2) - m
        trust = total.clamp_min(1e-300).pow(-2)
        eps = float((each * trust).sum() / trust.sum())
        total = m + max(eps, 0.0)
    scatter = float((trust * (each - eps)).square().sum().sqrt() / trust.sum())
    common = float(2 * COMMON_ERROR * (trust * total).sum() / trust.sum())
    stderr = (scatter**2 + common**2) ** 0.5
    expected = evidence.spec_number(EPS, 0.0)
    if stderr > TELLS * max(abs(eps), expected):
        why = f"inputs of {norm.site} are too large to show it: {eps:.2g} +- {stderr:.2g}"
        return gap(evidence, EPS, why)
    return KnobFit(
        knob=EPS, layer=evidence.layer, value=eps, stderr=stderr, residual=left, n=m.numel(), site=norm.site,
        evidence={"smallest_mean_square": float(m.min())},
    )  # fmt: skip
