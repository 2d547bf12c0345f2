"""Compute distances between captures, site by site, with only one chunk of one site in memory at a time."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity_audit.compare.assumed import not_comparable, set_aside
from parity_audit.compare.cancelling import cancelling_cause
from parity_audit.compare.floor import FEW_TOKENS, LARGEST, noise_ratio, real_tokens
from parity_audit.compare.logits import LogitsSums
from parity_audit.compare.moments import Moments
from parity_audit.compare.outputs import BY_HOOKS_ALONE, deciding_items, returns_what_is_hooked
from parity_audit.compare.shapes import Misfit, clipped, common_shape, shape_difference
from parity_audit.compare.signal import no_signal
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.compare.variation import Variation
from parity_audit.core.limits import share_of_limit
from parity_audit.core.report import LogitsDelta, SiteDelta, TokenLogits
from parity_audit.core.sites import ATTENTION_SITES, LOGITS, RETURNED, layer_of, site_order
from parity_audit.core.types import NotTested, NotVisible, Probe

CHUNK_ENTRIES = 1 << 17
"""Entries of a chunk: 1 MiB in float64, which stays in a processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one candidate: its deltas, and what was not compared.

    `sites` holds one delta per site, from the probe with the largest noise ratio; `by_probe` holds all deltas.
    `decoded` names the probes that the candidate decoded with its KV cache. `misshapen` lists the tensors that were not
    compared because their shape differs from the reference's. `no_signal` says why agreement with this reference would
    prove nothing; it is empty if agreement means something. `assumed` gives, by (probe, site), the assumption about the
    candidate's code under which a tensor is that site: such deltas may explain an error but do not decide. Those in
    `not_comparable` are not used at all (see `compare.assumed`). `broke_off` lists the errors that the candidate raised
    in probes that the reference ran. `batches` names the probes with several rows. `variation` is the distance between
    the candidate's own runs of different shapes.
    """

    sites: tuple[SiteDelta, ...]
    by_probe: tuple[SiteDelta, ...]
    logits: LogitsDelta | None
    worst_tokens: tuple[TokenLogits, ...] = ()
    not_tested: tuple[NotTested, ...] = ()
    non_finite: tuple[str, ...] = ()
    mask_mismatch: tuple[str, ...] = ()
    decoded: tuple[str, ...] = ()
    misshapen: tuple[Misfit, ...] = ()
    no_signal: str = ""
    seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    assumed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    not_comparable: tuple[NotVisible, ...] = ()
    batches: tuple[str, ...] = ()
    broke_off: tuple[str, ...] = ()
    variation: Variation = field(default_factory=Variation)

    def is_beyond(self, delta: SiteDelta) -> bool:
        """Whether a delta exceeds rounding, after widening the limit by how much the candidate's own runs of that shape
        vary."""
        shape = {"decoded": delta.probe in self.decoded, "batched": delta.probe in self.batches}
        return share_of_limit(delta) > self.variation.widening(delta.site, **shape)

    @property
    def deciding(self) -> tuple[SiteDelta, ...]:
        """One delta per site, of those that decide the verdict."""
        return worst_per_site(self.deciding_by_probe)

    @property
    def deciding_by_probe(self) -> tuple[SiteDelta, ...]:
        """Every delta that decides the verdict."""
        shown = [delta for delta in self.by_probe if (delta.probe, delta.site) not in self.assumed]
        return tuple(deciding_items(shown))

    @property
    def hooked_outputs(self) -> tuple[SiteDelta, ...]:
        """The deltas of the logits hook, on every probe."""
        return tuple(delta for delta in self.by_probe if delta.site == LOGITS)

    @property
    def misshapen_output(self) -> Misfit | None:
        """The first output whose shape differs from the reference's, None if there is none.

        Other sites may have another shape, and so may hooked logits if the returned value of that probe is compared.
        """
        compared = {delta.probe for delta in self.by_probe if delta.site == RETURNED}
        returned = [item for item in self.misshapen if item.site == RETURNED]
        hooked = [item for item in self.misshapen if item.site == LOGITS and item.probe not in compared]
        return next(iter([*returned, *hooked]), None)


@one_thread()
def compare(
    candidate: TensorSource,
    reference: TensorSource,
    judge: TensorSource | None,
    *,
    dtype: str,
    definition: TensorSource | None = None,
) -> Comparison:
    """Compare every site that both sides show, over every probe.

    `definition` is given if the reference itself departs from what the judge computes. The noise ratio is then
    RMSE(candidate, reference) / RMSE(definition, judge), so that the reference's error does not count as rounding.

    Raises:
        CaptureBroken: a file is missing, truncated or altered.
    """
    measured: list[tuple[str, str, Moments]] = []
    bad: list[str] = []
    masks: list[str] = []
    gaps: list[NotTested] = []
    unlike: list[NotVisible] = []
    assumed: dict[tuple[str, str], str] = {}
    misfits: list[Misfit] = []
    logits = LogitsSums()
    sides = [side for side in (candidate, reference, judge, definition) if side is not None]
    for probe in reference.probes:
        shared = candidate.sites(probe.name) & reference.sites(probe.name)
        once = returns_what_is_hooked(sides, probe.name)
        decides = LOGITS if once or RETURNED not in shared else RETURNED
        if not shared:
            gaps.append(NotTested(what=f"probe {probe.name}", why="the candidate did not run it"))
        if LOGITS in shared and RETURNED not in shared:
            gaps.append(BY_HOOKS_ALONE)
        for site in sorted(shared - {RETURNED} if once else shared, key=site_order):
            if assumption := _assumption(candidate, reference, definition, probe.name, site):
                assumed[probe.name, site] = assumption
            difference = shape_difference(sides, probe, site)
            if isinstance(difference, Misfit) and assumption:
                unlike.append(NotVisible(site=site, why=f"not comparable: {difference.words}"))
                continue
            if isinstance(difference, Misfit):
                misfits += [
                    difference,
                    *([dataclasses.replace(difference, site=RETURNED)] if once and site == LOGITS else []),
                ]
                if not difference.only_vocabulary:
                    continue
            elif difference is not None:
                gaps.append(difference)
            sums = logits if site == decides else None
            moments = _measure(candidate, reference, judge, probe, site, sums, definition)
            where = f"{probe.name}/{site}"
            if moments.non_finite and assumption:
                unlike.append(NotVisible(site=site, why="not comparable: it holds NaN or infinite entries here"))
                continue
            if moments.non_finite:
                bad.append(f"{where}: {moments.non_finite} NaN or infinite entries")
            if moments.hidden_by_one_side:
                masks.append(where)
            if moments.count == 0:
                gaps.append(NotTested(what=where, why="no finite entry at a real position"))
                continue
            measured.append((site, probe.name, moments))
            if once and site == LOGITS:
                measured.append((RETURNED, probe.name, moments))
    deltas = _deltas(measured, reference.probes, dtype)
    named = {probe.name: probe for probe in reference.probes}
    kept, aside = set_aside(
        deltas, assumed, lambda probe, layer: cancelling_cause(candidate, reference, named[probe], layer)
    )  # fmt: skip
    put_aside = {f"{item.delta.probe}/{item.delta.site}" for item in aside}
    return Comparison(
        sites=worst_per_site(kept), by_probe=tuple(kept), logits=logits.result(kept), worst_tokens=logits.worst_tokens(),
        not_tested=(*gaps, *(item.gap() for item in misfits)), non_finite=tuple(bad), misshapen=tuple(misfits),
        mask_mismatch=tuple(where for where in masks if where not in put_aside),
        broke_off=_broke_off(candidate, reference),
        decoded=tuple(probe.name for probe in reference.probes if probe.decode_from is not None),
        batches=tuple(probe.name for probe in reference.probes if probe.shape[0] > 1),
        no_signal=no_signal(definition or reference, judge, dtype=dtype), assumed=assumed,
        not_comparable=(*unlike, *not_comparable(aside, assumed)),
    )  # fmt: skip


def _broke_off(candidate: TensorSource, reference: TensorSource) -> tuple[str, ...]:
    """The errors that the candidate raised in probes that the reference ran."""
    ran = (probe.name for probe in reference.probes if reference.sites(probe.name))
    return tuple(error for name in ran if (error := candidate.raised(name)))


def _assumption(
    candidate: TensorSource, reference: TensorSource, definition: TensorSource | None, probe: str, site: str
) -> str:
    """The assumption about a side's code under which its tensor is the site; "" if there is none.

    The reference's taps are those that its spec was checked with, so its assumptions count only if it departs from the
    definition.
    """
    return candidate.assumes(probe, site) or ("" if definition is None else reference.assumes(probe, site))


def worst_per_site(deltas: Iterable[SiteDelta]) -> tuple[SiteDelta, ...]:
    """One delta per site, from the probe with the largest noise ratio."""
    worst: dict[str, SiteDelta] = {}
    for delta in deltas:
        known = worst.get(delta.site)
        if known is None or _severity(delta) > _severity(known):
            worst[delta.site] = delta
    return tuple(sorted(worst.values(), key=lambda delta: site_order(delta.site)))


def _severity(delta: SiteDelta) -> tuple[float, float]:
    return (delta.noise_ratio if delta.noise_ratio is not None else -1.0, delta.rel)


def rmse_to_forced(own: TensorSource, forced: TensorSource, probe: Probe, site: str) -> tuple[float, float]:
    """RMSE between a capture and the judge's replay on that capture's own inputs, and the rms of the replay.

    The RMSE is infinite if only one side masks some score, and both are NaN if the shapes cannot be compared.
    """
    if isinstance(common_shape([own, forced], probe.name, site), Misfit):
        return math.nan, math.nan
    moments = _measure(own, forced, None, probe, site, None)
    if moments.hidden_by_one_side:
        return math.inf, moments.rms(moments.reference_square_sum)
    return moments.rms(moments.square_sum), moments.rms(moments.reference_square_sum)


def _measure(
    candidate: TensorSource,
    reference: TensorSource,
    judge: TensorSource | None,
    probe: Probe,
    site: str,
    logits: LogitsSums | None,
    definition: TensorSource | None = None,
) -> Moments:
    moments, floor = Moments(), Moments()
    truth = [] if judge is None else [judge, *([] if definition is None else [definition])]
    judged = all(site in side.sites(probe.name) for side in truth)
    sides = [candidate, reference, *(truth if judged else [])]
    for offset, tensors in _lockstep(sides, probe.name, site):
        keep = _keep(probe, site, tensors[0].shape, offset)
        moments.add(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None, keep, offset)
        if len(tensors) == 4:
            floor.add(tensors[3], tensors[2], None, keep, offset)
        if logits is not None:
            logits.add(probe, offset, tensors[0], tensors[1], keep[..., 0])
    return moments.over(floor) if floor.count else moments


def _lockstep(sides: list[TensorSource], probe: str, site: str) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield chunks of the same rows of every side, cut to their common shape."""
    common = common_shape(sides, probe, site)
    if isinstance(common, Misfit):
        raise ValueError(common.words)
    per_row = math.prod(common) // max(common[1], 1)
    rows = max(1, CHUNK_ENTRIES // max(per_row, 1))
    for start in range(0, common[1], rows):
        stop = min(start + rows, common[1])
        tensors = [side.rows(probe, site, start, stop) for side in sides]
        yield start, [clipped(tensor, common) for tensor in tensors]


def _keep(probe: Probe, site: str, shape: torch.Size, offset: int) -> Tensor:
    """A mask of the entries of a chunk that belong to real tokens. Axis 1 is pos, or head for attention sites."""
    mask = torch.tensor(probe.mask, dtype=torch.bool)
    if site.endswith(ATTENTION_SITES):
        queries, keys = mask[:, : shape[2]], mask[:, : shape[3]]
        return (queries[:, None, :, None] & keys[:, None, None, :]).expand(shape)
    rows = mask[:, offset : offset + shape[1]]
    return rows.reshape(*rows.shape, *[1] * (len(shape) - 2)).expand(shape)


def _deltas(measured: Sequence[tuple[str, str, Moments]], probes: Sequence[Probe], dtype: str) -> list[SiteDelta]:
    """One delta per site and probe. For a probe with few tokens, the floor is at least the median floor of that site in
    the other probes, as a share of the judge's values."""
    few = {probe.name for probe in probes if real_tokens(probe) < FEW_TOKENS}
    shares: dict[str, list[float]] = {}
    for site, probe, moments in measured:
        if moments.judged and moments.judge_square_sum and probe not in few:
            shares.setdefault(site, []).append(math.sqrt(moments.reference_judge / moments.judge_square_sum))
    usual = {site: statistics.median(of_site) for site, of_site in shares.items()}
    return [
        _delta(site, probe, moments, dtype, usual.get(site, 0.0) if probe in few else 0.0)
        for site, probe, moments in measured
    ]


def _delta(site: str, probe: str, moments: Moments, dtype: str, floor_share: float) -> SiteDelta:
    """The delta of one site and probe; `floor_share` is the smallest floor, as a share of the rms of the judge's
    values."""
    rms = moments.rms(moments.judge_square_sum if moments.judged else moments.reference_square_sum)
    rmse = moments.rms(moments.square_sum)
    ratio = None
    if moments.judged:
        own, floor = moments.rms(moments.candidate_judge), max(moments.rms(moments.reference_judge), floor_share * rms)
        ratio = LARGEST if moments.hidden_by_one_side else noise_ratio(own, floor, rms, dtype)
    return SiteDelta(
        site=site, layer=layer_of(site), probe=probe, max_abs=moments.max_abs, rmse=rmse,
        rel=_relative(rmse, rms), noise_ratio=ratio, worst=moments.worst,
    )  # fmt: skip


def _relative(rmse: float, rms: float) -> float:
    """The quotient rmse / rms: 0 if there is no error, at most `LARGEST` (which is reached where rms is 0)."""
    return 0.0 if rmse == 0.0 else min(rmse / max(rms, sys.float_info.min), LARGEST)
