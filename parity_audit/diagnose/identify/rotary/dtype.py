"""The arithmetic behind cos and sin, from the complex factor C = m e^{i f pos} of each token and pair.

    cos and sin    C = m (round(cos(f pos)) + i round(sin(f pos)))
    angles         C = m e^{i round(f pos)}
    frequencies    C = m e^{i round(f) pos}
    positions      C = m e^{i f round(pos)}

Each is tried with bfloat16 and float16 and the table of frequencies that the spec, or the fit, gives. Where q itself
is in a narrow dtype, its own rounding hides that of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.identify.rotary.angles import Rotation
from parity_audit.diagnose.identify.rounding import best_of
from parity_audit.formulas.knobs import FULL, KNOBS
from parity_audit.formulas.rotary import angles

EXPLAINED = 3e-3


def arithmetic(rotation: Rotation, table: Tensor) -> tuple[str, dict[str, float]]:
    """ "full", or a dtype and what is rounded to it, when this table is meant; with what each variant leaves."""
    position, factor = torch.cat(rotation.positions), torch.cat(rotation.factors) / rotation.magnitude
    weight = torch.cat(rotation.weights).sqrt()
    variants = {
        value: torch.complex(*angles(position[None], table, table.dtype, arithmetic=value))[0]
        for value in KNOBS["rope.dtype"].choices
    }
    best, left = best_of(
        _weighted(factor, weight), {name: _weighted(value, weight) for name, value in variants.items()}
    )
    return (best if left[best] < EXPLAINED else FULL), left


def _weighted(factor: Tensor, weight: Tensor) -> Tensor:
    return torch.view_as_real(factor * weight)
