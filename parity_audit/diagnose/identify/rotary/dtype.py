"""The arithmetic behind cos and sin, from the complex factor C = m e^{i f pos} of each token and pair.

    cos and sin    C = m (round(cos(f pos)) + i round(sin(f pos)))
    angles         C = m e^{i round(f pos)}
    frequencies    C = m e^{i round(f) pos}
    positions      C = m e^{i f round(pos)}

Each is tried with bfloat16 and float16 and the table of frequencies that the spec, or the fit, gives. Where q itself
is in a narrow dtype, its own rounding hides that of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity_audit.diagnose.identify.rotary.angles import Rotation
from parity_audit.diagnose.identify.rounding import FULL, NARROW, best_of, rounded

EXPLAINED = 3e-3


def arithmetic(rotation: Rotation, table: Tensor) -> tuple[str, dict[str, float]]:
    """ "full", or a dtype and what is rounded to it, when this table is meant; with what each variant leaves."""
    position, factor = torch.cat(rotation.positions), torch.cat(rotation.factors) / rotation.magnitude
    weight = torch.cat(rotation.weights).sqrt()
    variants = dict(_variants(position[:, None], table))
    best, left = best_of(
        _weighted(factor, weight), {name: _weighted(value, weight) for name, value in variants.items()}
    )
    return (best if left[best] < EXPLAINED else FULL), left


def _weighted(factor: Tensor, weight: Tensor) -> Tensor:
    return torch.view_as_real(factor * weight)


def _variants(position: Tensor, table: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield FULL, _turn(position * table)
    for name, dtype in NARROW.items():
        angle = position * table
        yield f"{name} cos and sin", torch.complex(rounded(angle.cos(), dtype), rounded(angle.sin(), dtype))
        yield f"{name} angles", _turn(rounded(angle, dtype))
        yield f"{name} frequencies", _turn(position * rounded(table, dtype))
        yield f"{name} positions", _turn(rounded(position, dtype) * table)
        low = rounded(rounded(position, dtype) * rounded(table, dtype), dtype)
        yield f"{name} throughout", torch.complex(rounded(low.cos(), dtype), rounded(low.sin(), dtype))


def _turn(angle: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angle), angle)
