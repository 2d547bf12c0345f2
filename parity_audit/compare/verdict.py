"""One function decides. It needs deltas, finite numbers and the logits; a pass cannot be the default."""

from __future__ import annotations

from parity_audit.compare.deltas import Comparison
from parity_audit.core.limits import WARN_SHARE, limit_of
from parity_audit.core.report import SiteDelta, Verdict

REQUIRED = "logits"


def judge_comparison(comparison: Comparison) -> tuple[Verdict, str]:
    """The verdict and, in one line, why. Agreement with a reference that says nothing about its input claims nothing."""
    verdict, why = _judged(comparison)
    if verdict in (Verdict.EXACT, Verdict.PARITY) and comparison.no_signal:
        return Verdict.INCONCLUSIVE, comparison.no_signal
    return verdict, why


def _judged(comparison: Comparison) -> tuple[Verdict, str]:
    if comparison.non_finite:
        return Verdict.INCONCLUSIVE, f"not finite: {comparison.non_finite[0]}"
    if not comparison.by_probe:
        return Verdict.INCONCLUSIVE, "nothing was compared"
    if comparison.logits is None:
        return Verdict.INCONCLUSIVE, "the logits were not compared"
    if comparison.mask_mismatch:
        return Verdict.MISMATCH, f"the two sides attend to different positions at {comparison.mask_mismatch[0]}"
    if _identical(comparison):
        return Verdict.EXACT, f"bit-identical at {len(comparison.sites)} sites"
    if any(delta.noise_ratio is None for delta in comparison.by_probe):
        return Verdict.INCONCLUSIVE, "no judge measured the noise floor, so rounding and error cannot be told apart"
    return _against_floor(comparison)


def _identical(comparison: Comparison) -> bool:
    """Whether no bit differs in whole runs. The reference runs nothing token by token, so there rounding is all one can ask."""
    whole = [delta for delta in comparison.by_probe if delta.probe not in comparison.decoded]
    steps = [delta for delta in comparison.by_probe if delta.probe in comparison.decoded and delta.max_abs > 0.0]
    same = bool(whole) and all(delta.max_abs == 0.0 for delta in whole)
    return same and all(share_of_limit(delta) <= 1.0 for delta in steps)


def _against_floor(comparison: Comparison) -> tuple[Verdict, str]:
    wrong = [delta for delta in comparison.sites if share_of_limit(delta) > 1.0]
    if wrong:
        first = wrong[0]
        return (
            Verdict.MISMATCH,
            f"{ratio_of(first):.3g}x the noise floor at {first.site} (limit {limit_of(first.site):g}x)",
        )
    top = max(comparison.sites, key=share_of_limit)
    near = f"; close to the limit of {limit_of(top.site):g}x" if share_of_limit(top) > WARN_SHARE else ""
    return Verdict.PARITY, f"at most {ratio_of(top):.2g}x the noise floor (at {top.site}){near}"


def ratio_of(delta: SiteDelta) -> float:
    """The noise ratio as a number; a site without one counts as infinitely far."""
    return float("inf") if delta.noise_ratio is None else delta.noise_ratio


def share_of_limit(delta: SiteDelta) -> float:
    """The noise ratio over what counts as rounding at that site; above 1 it does not."""
    return ratio_of(delta) / limit_of(delta.site)


def first_divergence(comparison: Comparison) -> SiteDelta | None:
    """The first site, in the order of the data, that the floor does not explain."""
    return next((delta for delta in comparison.sites if share_of_limit(delta) > 1.0), None)
