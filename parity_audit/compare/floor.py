"""The noise floor: how far rounding alone takes a correct program, measured and never typed in.

Both sides are measured against the judge (the reference in true float64):

    noise_ratio = RMSE(candidate, judge) / max(RMSE(reference, judge), guard)

The guard is what storing the judge's value in the working dtype costs at least. Without it a site that
the reference happens to compute exactly (a plain table look-up) would turn the last bit of the candidate
into an infinite ratio. Rounding to nearest moves a value by at most eps/2 relative, uniformly: rms
eps / (2 sqrt 3), averaged over the mantissa about 0.2 eps. The guard is a quarter of eps, rounded up
because programs that round once more are still correct. Below the smallest normal number the spacing of a
dtype stays what it is there, so the guard is never 0 even where the judge is 0 everywhere.
"""

from __future__ import annotations

import sys

import torch

from parity_audit.core.types import Probe

LARGEST = 1e30
"""The largest ratio that is told apart: reports hold finite numbers only."""

FEW_TOKENS = 8
"""Real tokens of a probe whose floor is not taken from that probe alone.

The errors of a token's values often share a factor (the weight of an expert, the size of a norm), so n tokens hold about n
independent errors, and the squared ratio of two correct programs follows an F distribution with n and n degrees of freedom: of two
tokens it exceeds 4 squared once in 17, of eight once in 2700.
"""

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_eps(dtype: str) -> float:
    """Machine epsilon of a dtype by name (relative, no unit).

    Raises:
        KeyError: not a floating dtype of this project.
    """
    return torch.finfo(_DTYPES[dtype]).eps


def real_tokens(probe: Probe) -> int:
    """How many tokens of a probe are no padding."""
    return sum(sum(row) for row in probe.mask)


def guard(judge_rms: float, dtype: str) -> float:
    """The smallest error that counts as a floor, in the unit of the site."""
    return 0.25 * dtype_eps(dtype) * max(judge_rms, torch.finfo(_DTYPES[dtype]).tiny)


def noise_ratio(candidate_rmse: float, reference_rmse: float, judge_rms: float, dtype: str) -> float:
    """The candidate's error as a multiple of the floor (no unit, at most `LARGEST`); 0 when it equals the judge."""
    if candidate_rmse == 0.0:
        return 0.0
    floor = max(reference_rmse, guard(judge_rms, dtype), sys.float_info.min)
    return min(candidate_rmse / floor, LARGEST)
