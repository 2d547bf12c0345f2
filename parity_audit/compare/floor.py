"""The noise floor: the error that rounding alone causes in a correct program, always measured, never set by hand.

Both sides are measured against the judge (the reference in true float64):

    noise_ratio = RMSE(candidate, judge) / max(RMSE(reference, judge), guard)

The guard is the smallest error that storing the judge's value in the working dtype causes. Without it, a site that the
reference happens to compute exactly (a plain table look-up) would turn a difference in the candidate's last bit into an
infinite ratio. Rounding to nearest moves a value by at most eps/2 relative, uniformly distributed: its rms is eps / (2
sqrt 3), which averaged over the mantissa is about 0.2 eps. The guard is a quarter of eps, rounded up because programs
that round once more are still correct. Below the smallest normal number the spacing of a dtype is constant, so the
guard is never 0, even where the judge is 0 everywhere.
"""

from __future__ import annotations

import sys

import torch

from parity_audit.core.types import Probe

LARGEST = 1e30
"""The largest ratio that is reported, since reports hold finite numbers only."""

FEW_TOKENS = 8
"""Number of real tokens below which a probe's floor is not taken from that probe alone.

The errors of a token's values often share a factor (the weight of an expert, the size of a norm), so n tokens give
about n independent errors. The squared ratio of two correct programs then follows an F distribution with n and n
degrees of freedom: with two tokens the ratio exceeds 4 once in 17 cases, with eight once in 2700.
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
    """The number of tokens of a probe that are not padding."""
    return sum(sum(row) for row in probe.mask)


def guard(judge_rms: float, dtype: str) -> float:
    """The smallest error that counts as a floor (see above), in the unit of the site."""
    return 0.25 * dtype_eps(dtype) * max(judge_rms, torch.finfo(_DTYPES[dtype]).tiny)


def noise_ratio(candidate_rmse: float, reference_rmse: float, judge_rms: float, dtype: str) -> float:
    """The candidate's error as a multiple of the floor (no unit, at most `LARGEST`); 0 when it equals the judge."""
    if candidate_rmse == 0.0:
        return 0.0
    floor = max(reference_rmse, guard(judge_rms, dtype), sys.float_info.min)
    return min(candidate_rmse / floor, LARGEST)
