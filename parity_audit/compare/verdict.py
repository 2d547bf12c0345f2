"""Decide the verdict: a pass requires deltas, finite numbers and logits, and is never the default.

Sites that rest on an assumption about the candidate's code (`Comparison.assumed`) do not decide: see `assumed`.
"""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.compare.deltas import Comparison, worst_per_site
from parity_audit.compare.outputs import deciding_items
from parity_audit.core.limits import WARN_SHARE, limit_of, ratio_of, share_of_limit
from parity_audit.core.report import SiteDelta, Verdict
from parity_audit.core.sites import ENTERS_BLOCK, LEAVES_BLOCK, LOGITS, RETURNED, local_name

STREAM = (*ENTERS_BLOCK, "resid_mid", *LEAVES_BLOCK)
"""The sites of the residual stream in a block."""


def judge_comparison(comparison: Comparison) -> tuple[Verdict, str]:
    """The verdict, and the reason in one line.

    Two kinds of agreement are inconclusive: with a reference whose logits carry no signal, and in the probes that a
    candidate completed, if it raised an error in another probe that the reference ran.
    """
    verdict, why = _judged(comparison)
    if verdict not in (Verdict.EXACT, Verdict.PARITY):
        return verdict, why
    if comparison.no_signal:
        return Verdict.INCONCLUSIVE, comparison.no_signal
    if comparison.broke_off:
        return Verdict.INCONCLUSIVE, f"{comparison.broke_off[0]}; elsewhere {why}"
    return verdict, why


def _judged(comparison: Comparison) -> tuple[Verdict, str]:
    if comparison.non_finite:
        return Verdict.INCONCLUSIVE, f"not finite: {comparison.non_finite[0]}"
    if comparison.misshapen_output is not None:
        return Verdict.MISMATCH, comparison.misshapen_output.words
    if not comparison.deciding_by_probe:
        return Verdict.INCONCLUSIVE, "nothing was compared"
    if comparison.logits is None:
        return Verdict.INCONCLUSIVE, "the logits were not compared"
    if comparison.mask_mismatch:
        return Verdict.MISMATCH, f"the two sides attend to different positions at {comparison.mask_mismatch[0]}"
    if not any(delta.max_abs > 0.0 for delta in comparison.deciding_by_probe):
        if any(delta.max_abs > 0.0 for delta in comparison.hooked_outputs):
            return Verdict.PARITY, "what it returns is bit-identical; the logits hook shows something else"
        return Verdict.EXACT, f"bit-identical at {len(comparison.deciding)} sites"
    if any(delta.noise_ratio is None for delta in comparison.deciding_by_probe):
        return Verdict.INCONCLUSIVE, "no judge measured the noise floor, so rounding and error cannot be told apart"
    return _against_floor(comparison)


def judge_rest(comparison: Comparison) -> tuple[Verdict, str]:
    """The verdict on the compared sites, for comparisons that leave the logits out on purpose."""
    if comparison.non_finite or comparison.mask_mismatch or not comparison.deciding_by_probe:
        return _judged(comparison)
    if any(delta.noise_ratio is None for delta in comparison.deciding_by_probe):
        return Verdict.INCONCLUSIVE, "no judge measured the noise floor, so rounding and error cannot be told apart"
    return _against_floor(comparison)


def agreement_outside(comparison: Comparison) -> str:
    """A sentence that a port's output and its residual stream agree, whatever differs inside its blocks; "" if they do
    not."""
    outside = [
        delta for delta in comparison.deciding_by_probe
        if delta.site in (LOGITS, RETURNED) or local_name(delta.site) in STREAM
    ]  # fmt: skip
    shown = {delta.site in (LOGITS, RETURNED) for delta in outside}
    agree = shown == {True, False} and not any(map(comparison.is_beyond, outside))
    return "what it returns and its residual stream agree in every probe of this run" if agree else ""


def _against_floor(comparison: Comparison) -> tuple[Verdict, str]:
    over = [delta for delta in comparison.deciding_by_probe if share_of_limit(delta) > 1.0]
    first = next(iter(worst_per_site(filter(comparison.is_beyond, over))), None)
    if first is not None:
        return (
            Verdict.MISMATCH,
            f"{ratio_of(first):.3g}x the noise floor at {first.site} (limit {limit_of(first.site):g}x)",
        )
    return Verdict.PARITY, _of_its_own_making(over) if over else _how_near(comparison)


def _of_its_own_making(over: Sequence[SiteDelta]) -> str:
    """The reason why differences beyond the plain limit are no mismatch."""
    top = max(over, key=share_of_limit)
    return (
        f"{ratio_of(top):.2g}x the noise floor at {top.site} (probe {top.probe}), where the candidate's own runs of other shapes "
        "are as far apart"
    )


def _how_near(comparison: Comparison) -> str:
    """Words for the largest noise ratio; if whole runs are bit-identical, they say so and give the ratio of cached
    decoding."""
    moved = [delta for delta in comparison.deciding_by_probe if delta.max_abs > 0.0]
    only_decoded = {delta.probe for delta in moved} <= set(comparison.decoded)
    ran_whole = any(delta.probe not in comparison.decoded for delta in comparison.deciding_by_probe)
    top = max(moved if only_decoded and ran_whole else comparison.deciding, key=share_of_limit)
    near = f"; close to the limit of {limit_of(top.site):g}x" if share_of_limit(top) > WARN_SHARE else ""
    if only_decoded and ran_whole:
        return f"bit-identical in whole runs; cached decoding at parity, {ratio_of(top):.2g}x (at {top.site}){near}"
    return f"at most {ratio_of(top):.2g}x the noise floor (at {top.site}){near}"


def first_divergence(comparison: Comparison) -> SiteDelta | None:
    """The first site, in the order in which sites are computed, that the floor does not explain.

    If the first such site is the returned value and the hooked logits depart as well, the hooked logits are named.
    """
    beyond = filter(comparison.is_beyond, deciding_items(comparison.by_probe))
    first = next(iter(worst_per_site(beyond)), None)
    if first is None or first.site != RETURNED:
        return first
    hooked = [delta for delta in comparison.by_probe if delta.site == LOGITS and comparison.is_beyond(delta)]
    return next(iter(worst_per_site(hooked)), first)
