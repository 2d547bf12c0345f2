"""A narrow dtype inside the head: where logits are the product of the final norm and the checkpoint's tensors but for rounding,
the place of a dtype that reproduces them clearly better."""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread
from parity_audit.diagnose.identify.rounding import FULL, NARROW, any_narrow, best_of, rounded

SCALE, CAP, DTYPE = "logits.scale", "logits.softcap", "logits.dtype"
TOKENS, COLUMNS = 64, 2048
NARROWEST, ATANH = 0.03, 1e-12


def fit(evidence: Evidence) -> list[Outcome]:
    """logits.dtype, of a sample of tokens and of columns."""
    if evidence.layer is not None:
        return []
    unembed = evidence.weight("unembed")
    if unembed is None:
        return [gap(evidence, DTYPE, "no checkpoint weight for the unembedding")]
    columns = spread(unembed.shape[0], COLUMNS)
    tokens = _tokens(evidence, columns)
    if tokens is None:
        return [gap(evidence, DTYPE, "the final norm or the logits are not visible")]
    hidden, logits = tokens
    stored = evidence.weight("unembed.bias")
    bias = torch.zeros(len(columns), dtype=torch.float64) if stored is None else f64(stored).flatten()[columns]
    return _dtype(evidence, hidden, f64(unembed[columns]), bias, logits)


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
