"""Logits from the final norm: scale, soft-cap, and a shift that is constant over the vocabulary.

    logits = g(scale * y, 1/cap^2),   y = h W_U^T + b   or, centred,   y minus its mean over the vocabulary

`saturation.fit_curve` on (y, logits) with and without centring. A cap bends, a centring shifts each token by its
own constant, a scale multiplies: three different shapes, so they can be fitted together. logits.dtype: where logits are the
plain product but for rounding, the place of a narrow dtype that reproduces them clearly better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread
from parity_audit.diagnose.identify.attention.saturation import CapEstimate, cap_fit, fit_curve
from parity_audit.diagnose.identify.rounding import FULL, NARROW, any_narrow, best_of, rounded
from parity_audit.diagnose.thresholds import EXPLAINED, TIED

SCALE, CAP, SHIFT, DTYPE = "logits.scale", "logits.softcap", "logits.shift", "logits.dtype"
PLAIN, CENTRED, WITHOUT = 0.0, "centred", "without its bias"
BIAS, AS_STORED, MISSING = "logits.bias", "the checkpoint's", "missing"
TOKENS, COLUMNS, MEAN_ROWS = 64, 2048, 16384
NARROWEST, ATANH = 0.03, 1e-12


def fit(evidence: Evidence) -> list[Outcome]:
    """logits.scale, logits.softcap and logits.shift (0, or "centred")."""
    if evidence.layer is not None:
        return []
    unembed = evidence.weight("unembed")
    if unembed is None:
        return [gap(evidence, knob, "no checkpoint weight for the unembedding") for knob in (SCALE, CAP)]
    columns = spread(unembed.shape[0], COLUMNS)
    tokens = _tokens(evidence, columns)
    if tokens is None:
        return [gap(evidence, knob, "the final norm or the logits are not visible") for knob in (SCALE, CAP)]
    hidden, logits = tokens
    stored = evidence.weight("unembed.bias")
    bias = torch.zeros(unembed.shape[0], dtype=torch.float64) if stored is None else f64(stored).flatten()
    bare = hidden @ f64(unembed[columns]).T
    plain = bare + bias[columns]
    centred = plain - (hidden @ mean_row(unembed))[:, None] - bias.mean()
    everything = torch.ones_like(plain, dtype=torch.bool)
    made: dict[str | float, Tensor] = {PLAIN: plain, CENTRED: centred}
    if stored is not None:
        made[WITHOUT] = bare
    fits = {name: fit_curve([(y, logits, everything)]) for name, y in made.items()}
    usable = {name: found for name, found in fits.items() if found is not None}
    if not usable:
        return [gap(evidence, knob, "all logits are zero") for knob in (SCALE, CAP)]
    said = _knobs(evidence, usable, float(logits.norm()), biased=stored is not None)
    return [*said, *_dtype(evidence, hidden, f64(unembed[columns]), bias[columns], logits)]


def _dtype(evidence: Evidence, hidden: Tensor, unembed: Tensor, bias: Tensor, logits: Tensor) -> list[Outcome]:
    """Whether a narrow dtype stands in the product: only of plain ones, and of runs that are not in such a dtype anyway."""
    exact, logits = hidden @ unembed.T + bias, _undone(evidence, logits)
    if any_narrow(hidden) or relative_rms(logits - exact, logits) > NARROWEST:
        return []
    variants = {FULL: exact}
    for name, dtype in NARROW.items():
        x, w, b = (rounded(value, dtype) for value in (hidden, unembed, bias))
        variants |= {
            f"{name} weights": hidden @ w.T + bias, f"{name} inputs": x @ unembed.T + bias,
            f"{name} inputs and weights": x @ w.T + bias, f"{name} logits": rounded(exact, dtype),
            f"{name} throughout": rounded(x @ w.T + b, dtype),
        }  # fmt: skip
    value, left = best_of(logits, variants)
    shown = dict(sorted(left.items(), key=lambda item: item[1])[:3])
    return [KnobFit(
        knob=DTYPE, layer=None, value=value, stderr=None, residual=left[value], n=logits.numel(), site="logits",
        evidence={"left_over": shown},
    )]  # fmt: skip


def _undone(evidence: Evidence, logits: Tensor) -> Tensor:
    """The product before the spec's factor and soft-cap."""
    cap = evidence.spec_number(CAP, 0.0)
    if cap:
        logits = cap * torch.atanh((logits / cap).clamp(-1 + ATANH, 1 - ATANH))
    return logits / evidence.spec_number(SCALE, 1.0)


def _tokens(evidence: Evidence, columns: Tensor) -> tuple[Tensor, Tensor] | None:
    hidden, logits = [], []
    for probe in evidence.short_probes():
        h, out = evidence.tensor(probe.name, "ln_final.out"), evidence.tensor(probe.name, "logits")
        if h is not None and out is not None:
            kept = real(probe).nonzero()
            kept = kept[spread(len(kept), TOKENS // 2)]
            hidden.append(f64(h[kept[:, 0], kept[:, 1]]))
            logits.append(f64(out[kept[:, 0], kept[:, 1]][:, columns]))
    if not hidden:
        return None
    chosen = spread(sum(len(h) for h in hidden), TOKENS)
    return torch.cat(hidden)[chosen], torch.cat(logits)[chosen]


def mean_row(unembed: Tensor) -> Tensor:
    """The mean of W_U over the vocabulary `[d_model]`, in float64, a block of rows at a time."""
    return torch.stack([f64(block).sum(0) for block in torch.split(unembed, MEAN_ROWS)]).sum(0) / unembed.shape[0]


def _knobs(evidence: Evidence, fits: dict[str | float, CapEstimate], size: float, *, biased: bool) -> list[Outcome]:
    left = {name: found.squares**0.5 / max(size, 1e-300) for name, found in fits.items()}
    best = min(left, key=lambda name: left[name])
    if left[best] > EXPLAINED:
        why = f"no scale, cap or shift explains the logits: {left[best]:.2g} left"
        return [gap(evidence, knob, why) for knob in (SCALE, CAP)]
    estimate = fits[best]
    tied = [name for name in left if name != best and left[name] <= TIED * left[best]]
    outcomes: list[Outcome] = [KnobFit(
        knob=SCALE, layer=None, value=float(estimate.value[0]), stderr=float(estimate.stderr[0]), residual=left[best],
        n=estimate.n, site="logits",
    )]  # fmt: skip
    cap = cap_fit(CAP, None, estimate, residual=left[best], site="logits", spec_cap=evidence.spec_value(CAP))
    outcomes.append(gap(evidence, CAP, cap) if isinstance(cap, str) else cap)
    facts = {"left_over": {str(name): rest for name, rest in left.items()}, "tied_with": tied}
    if biased:
        outcomes.append(KnobFit(
            knob=BIAS, layer=None, value=MISSING if best == WITHOUT else AS_STORED, stderr=None, residual=left[best],
            n=estimate.n, site="logits", evidence={"left_over": facts["left_over"]},
        ))  # fmt: skip
    if best == WITHOUT:
        return outcomes
    outcomes.append(KnobFit(
        knob=SHIFT, layer=None, value=best, stderr=None, residual=left[best], n=estimate.n, site="logits",
        evidence=facts,
    ))  # fmt: skip
    return outcomes
