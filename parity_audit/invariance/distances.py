"""Measure how far two runs of one sequence differ: in bits, in units of the last place, in nats, in noise floors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.compare.floor import noise_ratio
from parity_audit.core.invariance_report import SiteChange
from parity_audit.core.sites import LOGITS, RETURNED, site_order

Values = Mapping[str, Tensor]
"""Sites of the subject, `[pos, ...]` in float32 (exact for narrower dtypes)."""
SMALLEST_EXPONENT = {"float32": -126, "bfloat16": -126, "float16": -14}
FRACTION_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The reference's rounding at a site: its RMSE to the float64 judge, and the judge's RMS, both `[pos]`."""

    rmse: tuple[float, ...]
    judge_rms: tuple[float, ...]

    def ratio(self, position: int, rmse: float, dtype: str) -> float:
        """Return an error at a position as a multiple of the floor.

        The floor is the larger of the position's own floor and the median of all positions, because the reference may by
        chance round very well at a position.
        """
        floor = max(self.rmse[position], sorted(self.rmse)[len(self.rmse) // 2])
        return noise_ratio(rmse, floor, self.judge_rms[position], dtype)


def floors(native: Values, judge: Values) -> dict[str, Floor]:
    """Return the noise floor of every site that both runs of the reference show with the same shape."""
    found = {}
    for site in native.keys() & judge.keys():
        own, exact = rows(native[site]), rows(judge[site])
        if own.shape == exact.shape:
            found[site] = Floor(rmse=tuple(rms(own - exact).tolist()), judge_rms=tuple(rms(exact).tolist()))
    return found


def bits(values: Values, start: int = 0) -> dict[str, str]:
    """Return a hash of each site from a position on; equal hashes mean equal bits, and 0.0 differs from -0.0."""
    return {
        site: hashlib.sha256(value[start:].contiguous().numpy().tobytes()).hexdigest()[:16]
        for site, value in values.items()
    }


def joint(hashes: Mapping[str, str], sites: Sequence[str]) -> str:
    """Return one hash of the given sites."""
    return hashlib.sha256("".join(hashes[site] for site in sorted(sites)).encode()).hexdigest()[:16]


def changes(
    seen: Values, base: Values, sites: Sequence[str], start: int, floor: Mapping[str, Floor], dtype: str
) -> tuple[SiteChange, ...]:
    """Return the distance between two runs at each of these sites, in the order in which the model computes them."""
    return tuple(
        change(site, rows(seen[site])[start:], rows(base[site])[start:], start, floor.get(site), dtype)
        for site in sorted(sites, key=site_order)
    )


def change(site: str, seen: Tensor, base: Tensor, start: int, floor: Floor | None, dtype: str) -> SiteChange:
    """Return the distance between two runs at one site `[pos, numbers]`; the first row is position `start` of the subject."""
    apart = (seen - base).abs()
    errors = rms(seen - base)
    ratios = None if floor is None else [floor.ratio(start + at, one, dtype) for at, one in enumerate(errors.tolist())]
    worst = max(range(len(errors)), key=lambda at: errors[at] if ratios is None else ratios[at])
    top = base.abs().amax(1).clamp_min(torch.finfo(torch.float64).tiny)
    return SiteChange(
        site=site, max_abs=float(apart.max()), ulp=float((apart.amax(1) / spacing(top, dtype)).max()),
        ratio=None if ratios is None else ratios[worst], position=start + worst,
    )  # fmt: skip


def spacing(value: Tensor, dtype: str) -> Tensor:
    """Return the unit in the last place of positive numbers in a dtype: 2^(exponent - fraction bits).

    Subnormal numbers have the unit of the smallest normal number.
    """
    exponent = value.log2().floor().clamp_min(SMALLEST_EXPONENT[dtype])
    return torch.exp2(exponent - FRACTION_BITS[dtype])


def nats(seen: Tensor, base: Tensor) -> float:
    """Return the largest difference of a log-probability over positions and vocabulary, from logits `[pos, d_vocab]`."""
    return float((seen.double().log_softmax(-1) - base.double().log_softmax(-1)).abs().max())


def returned(values: Values) -> Tensor | None:
    """Return the logits that the model returned, or the hooked ones if these were not captured, `[pos, d_vocab]`."""
    return values.get(RETURNED, values.get(LOGITS))


def rows(value: Tensor) -> Tensor:
    """Return a site's values as `[pos, numbers]` in float64."""
    return value.double().reshape(len(value), -1)


def rms(value: Tensor) -> Tensor:
    """Return the root mean square of each row, `[pos]`."""
    return value.square().mean(1).sqrt()
