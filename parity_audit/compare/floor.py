"""The noise floor: how far rounding alone takes a correct program, measured and never typed in.

Both sides are measured against the judge (the reference in true float64):

    noise_ratio = RMSE(candidate, judge) / max(RMSE(reference, judge), guard)

The guard is what storing the judge's value in the working dtype costs at least. Without it a site that
the reference happens to compute exactly (a plain table look-up) would turn the last bit of the candidate
into an infinite ratio. Rounding to nearest moves a value by at most eps/2 relative, uniformly: rms
eps / (2 sqrt 3), averaged over the mantissa about 0.2 eps. The guard is a quarter of eps, rounded up
because programs that round once more are still correct.
"""

from __future__ import annotations

import torch

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


def guard(judge_rms: float, dtype: str) -> float:
    """The smallest error that counts as a floor, in the unit of the site."""
    return 0.25 * dtype_eps(dtype) * judge_rms


def noise_ratio(candidate_rmse: float, reference_rmse: float, judge_rms: float, dtype: str) -> float:
    """The candidate's error as a multiple of the floor (no unit); 0 when candidate and judge are equal."""
    if candidate_rmse == 0.0:
        return 0.0
    floor = max(reference_rmse, guard(judge_rms, dtype))
    return candidate_rmse / floor if floor > 0.0 else float("inf")
