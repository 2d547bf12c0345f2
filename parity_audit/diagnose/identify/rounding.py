"""Which arithmetic made these numbers? Rounding leaves a pattern that no smooth formula has.

A formula recomputed with the rounding in the right place reproduces the tensor many times better than the formula alone; that
ratio is the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.diagnose.thresholds import CLEAR
from parity_audit.formulas.knobs import FULL

FLOOR = 1e-6  # less is float32's own rounding


def best_of(truth: Tensor, variants: Mapping[str, Tensor]) -> tuple[str, dict[str, float]]:
    """The variant that reproduces `truth` clearly better than `FULL` does, else `FULL`; with what each leaves."""
    left = {name: relative_rms(value - truth, truth) for name, value in variants.items()}
    best = min(left, key=lambda name: left[name])
    return (best if CLEAR * left[best] < left[FULL] and left[FULL] > FLOOR else FULL), left
