"""From pattern to z: z_hi = c_h sum_j p_hij v_j with c_h = 1, or heads that are scaled, zeroed or gated.

Where the pattern is visible, c_h is a regression over all queries and components. What is left when a number per head
does not do it is tried as a gate per component (the same for all tokens) or per token. Queries that also attend to padding, whose
values are not among these, say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, relative_rms
from parity_audit.diagnose.identify.attention.rows import Row
from parity_audit.diagnose.thresholds import ALIKE, CLEAR

KNOB = "attention.heads"
PLAIN = "as attended"
FLOOR = 1e-5
ROUNDING = 2.0**-9
"""Of z in bfloat16. Pattern and values are the candidate's own, so a law leaves no more: where one key has nearly all the weight,
factors and gates come near anything that changes its values."""


def fit_output(evidence: Evidence, rows: Sequence[Row], values: Sequence[int]) -> Outcome:
    """What becomes of each head's weighted values; `values` is the kv head of each head."""
    made, seen = [], []
    for row in rows:
        pattern = evidence.tensor(row.probe, "pattern")
        if pattern is None or row.v is None or row.z is None:
            continue
        whole = f64(pattern[row.batch][:, row.kept])
        own = whole[:, :, row.kept]
        here = ((whole.sum(-1) - own.sum(-1)).abs() <= FLOOR).all(0)
        made.append(torch.einsum("hij,jhd->ihd", own, row.v[:, list(values)])[here])
        seen.append(row.z[here])
    if not made:
        return gap(evidence, KNOB, "pattern, v and z are not all visible")
    x, z = torch.cat(made), torch.cat(seen)
    if not z.numel():
        return gap(evidence, KNOB, "every query attends to padding")
    factor = _factor(x, z, (0, 2))
    tries: dict[str, float] = {
        "factor": relative_rms(z - factor * x, z),
        "a gate per component": relative_rms(z - _factor(x, z, (0,)) * x, z),
        "a gate per token": relative_rms(z - _factor(x, z, (2,)) * x, z),
    }
    best = min(tries, key=lambda name: tries[name])
    best = best if tries[best] * CLEAR < tries["factor"] and tries["factor"] > FLOOR else "factor"
    if tries[best] > ROUNDING:
        return gap(evidence, KNOB, f"z is no multiple of pattern times v: {tries[best]:.2g} left")
    return KnobFit(
        knob=KNOB, layer=evidence.layer, value=_said(factor.flatten(), tries["factor"]) if best == "factor" else best,
        stderr=None, residual=tries[best], n=z.numel(), site="z", evidence={"factors": factor.flatten().tolist()},
    )  # fmt: skip


def _factor(x: Tensor, z: Tensor, over: tuple[int, ...]) -> Tensor:
    return (x * z).sum(over, keepdim=True) / x.square().sum(over, keepdim=True).clamp_min(1e-300)


def _said(factor: Tensor, left: float) -> KnobValue:
    if float((factor - 1).abs().max()) <= max(ALIKE, left):
        return PLAIN
    return [float(f"{value:.4g}") for value in factor.tolist()]
