"""Which arithmetic made these numbers? Rounding leaves a pattern that no smooth formula has.

A value of a narrow dtype survives a round trip through it unchanged. And a formula recomputed with the rounding in
the right place reproduces the tensor many times better than the formula alone; that ratio is the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.diagnose.thresholds import CLEAR

NARROW: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = "full"
FLOOR = 1e-6  # less is float32's own rounding
LARGEST_ERROR = 4.0
ONE_WAY = 0.5


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x after a round trip through a narrow dtype."""
    return x.to(dtype).to(x.dtype)


def representable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is one of the dtype's: then the tensor may well have been computed in it."""
    return bool((rounded(x, dtype) == x).all())


def any_narrow(x: Tensor) -> bool:
    """Whether the values fit bfloat16 or float16 exactly."""
    return any(representable(x, dtype) for dtype in NARROW.values())


def best_of(truth: Tensor, variants: Mapping[str, Tensor]) -> tuple[str, dict[str, float]]:
    """The variant that reproduces `truth` clearly better than `FULL` does, else `FULL`; with what each leaves."""
    left = {name: relative_rms(value - truth, truth) for name, value in variants.items()}
    best = min(left, key=lambda name: left[name])
    return (best if CLEAR * left[best] < left[FULL] and left[FULL] > FLOOR else FULL), left


def like_rounding(truth: Tensor, formula: Tensor) -> str | None:
    """The dtype whose rounding bounds every relative error, where the errors are of its size; None for other errors.

    Any other cause leaves errors that do not shrink with the value itself, or that all point one way.
    """
    signed = (truth - formula) / formula.abs().clamp_min(1e-300) * formula.sign()
    relative = signed.abs()
    if float(signed.mean().abs()) > ONE_WAY * float(relative.mean()):
        return None
    # The median: where a bias was subtracted, a few values are so small that float32's own rounding looks large.
    high, typical = float(relative.flatten().quantile(0.999)), float(relative.median())
    for name, dtype in NARROW.items():
        unit = torch.finfo(dtype).eps / 2
        if high <= LARGEST_ERROR * unit and typical >= unit / 8:
            return name
    return None
