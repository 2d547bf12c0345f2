"""Decide which leg departs, from each leg's distance to the judge in multiples of the trainer's own rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity_audit.compare.floor import noise_ratio
from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.logprob_report import Leg, LogprobFinding
from parity_audit.core.report import Verdict
from parity_audit.logprobs.legs import DECODE, PREFILL, TRAINER
from parity_audit.logprobs.paired import Array


def rmse(values: Array, judge: Array) -> float:
    """Return the root mean square difference in nats."""
    return float(np.sqrt(np.square(values - judge).mean()))


def ratio(values: Array, trainer: Array, judge: Array, dtype: str) -> float:
    """Return RMSE(values, judge) over RMSE(trainer, judge): 1 is the trainer's own rounding, above 4 is more than rounding."""
    return noise_ratio(rmse(values, judge), rmse(trainer, judge), float(np.sqrt(np.square(judge).mean())), dtype)


def departing(legs: Sequence[Leg]) -> list[str]:
    """Return the names of the legs that are further from the judge than rounding explains."""
    return [leg.name for leg in legs if leg.noise_ratio is not None and leg.noise_ratio > PARITY_RATIO]


def odd_leg(legs: Sequence[Leg]) -> str | None:
    """Return the leg that departs, or "engine" if both engine legs do; None if no leg departs."""
    wrong = departing(legs)
    if {DECODE, PREFILL} <= set(wrong):
        return "engine"
    return wrong[0] if wrong else None


def decide(legs: Sequence[Leg], findings: Sequence[LogprobFinding]) -> tuple[Verdict, str]:
    """Return the verdict and its reason; it is inconclusive if the decode leg was not measured against the judge."""
    judged = [leg for leg in legs if leg.noise_ratio is not None and leg.name in (DECODE, PREFILL, TRAINER)]
    if not any(leg.name == DECODE for leg in judged):
        return Verdict.INCONCLUSIVE, "no rollout was measured against the judge"
    odd = odd_leg(legs)
    if odd is not None:
        worst = max(judged, key=lambda leg: leg.noise_ratio or 0.0)
        side = "trainer and judge agree" if odd == "engine" else "the other legs agree with the judge"
        return Verdict.MISMATCH, f"{odd} departs: {worst.noise_ratio:.3g}x the trainer's rounding ({side})"
    if findings:
        return Verdict.MISMATCH, f"{findings[0].name}: {findings[0].message}"
    worst = max(judged, key=lambda leg: leg.noise_ratio or 0.0)
    return Verdict.PARITY, f"every leg is within {worst.noise_ratio:.2g}x the trainer's rounding"
