"""What becomes of the scores before they weigh the values: softmax, or another law.

With the spec's scores s = q.k / scale (capped where the spec caps them) over the keys up to the query, z = f(s) v for

    softmax, softmax twice, sigmoid(s), relu(s), relu(s)^2, s itself, exp(s) not divided

and the law that leaves rounding is the answer. A model with biases, sinks or a window that hides something is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, relative_rms
from parity_audit.diagnose.identify.attention.rows import Row, dot_products

KNOB, SOFTMAX = "attention.weights", "softmax"
RIGHT = 1e-4
OTHERS, WINDOW = ("attention.alibi", "attention.sinks", "attention.bias"), "attention.window"
Law = Callable[[Tensor, Tensor], Tensor]


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


LAWS: dict[str, Law] = {
    SOFTMAX: _softmax,
    "softmax twice": lambda s, seen: _softmax(_softmax(s, seen), seen),
    "sigmoid of the scores": lambda s, seen: torch.sigmoid(s) * seen,
    "relu of the scores": lambda s, seen: torch.relu(s) * seen,
    "squared relu of the scores": lambda s, seen: torch.relu(s).square() * seen,
    "the scores themselves": lambda s, seen: s * seen,
    "exp of the scores": lambda s, seen: s.exp() * seen,
}


def fit_weights(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]) -> list[Outcome]:
    """The law, where one of these is all that there is; nothing otherwise."""
    whole = [row for row in rows if row.v is not None and row.z is not None]
    hides = any(row.length > evidence.spec_number(WINDOW, float("inf")) for row in whole)
    if not whole or hides or any(evidence.spec_value(knob) is not None for knob in OTHERS):
        return []
    z = torch.cat([row.z.flatten() for row in whole if row.z is not None])
    for name, law in LAWS.items():
        made = torch.cat([_made(evidence, row, heads, law).flatten() for row in whole])
        if bool(torch.isfinite(made).all()) and (left := relative_rms(made - z, z)) <= RIGHT:
            return [
                KnobFit(knob=KNOB, layer=evidence.layer, value=name, stderr=None, residual=left, n=len(z), site="z")
            ]
    return []


def _made(evidence: Evidence, row: Row, heads: Sequence[int], law: Law) -> Tensor:
    assert row.v is not None
    scores = dot_products(row, heads, torch.arange(row.length), row.length)
    scores = scores / evidence.spec_number("attention.scale", evidence.dims["d_head"] ** 0.5)
    cap = evidence.spec_value("attention.softcap")
    if isinstance(cap, (int, float)) and cap:
        scores = cap * torch.tanh(scores / cap)
    seen = torch.ones(row.length, row.length, dtype=torch.bool).tril()
    return torch.einsum("hij,jhd->ihd", law(scores, seen), row.v[:, list(heads)])
