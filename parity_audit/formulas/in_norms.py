"""The norms of the residual stream, of what enters and leaves its sublayers: one kind, eps and offset for all of them."""

from __future__ import annotations

from torch import Tensor

from parity_audit.formulas import norms
from parity_audit.formulas.place import Place


def normed(at: Place, x: Tensor, role: str) -> Tensor:
    """x `[batch pos d_model]` under the norm whose weight and bias have this role."""
    return norms.norm(
        x, at.weight(role), at.weight(f"{role}.bias"), kind=at.knob("norm.kind"), eps=at.knob("norm.eps"),
        offset=at.knob("norm.offset"), eps_place=at.knob("norm.eps_place"),
    )  # fmt: skip
