"""From a mismatch to findings: replay on own inputs, pick the suspects, fit their constants on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from parity_audit.capture.scratch import DISK_BOUND
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture, wanted
from parity_audit.compare.deltas import Comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.limits import limit_of, share_of_limit
from parity_audit.core.report import Finding
from parity_audit.core.sites import DELTA_SITES, RETURNED, layer_of, local_name
from parity_audit.core.types import NotTested, Probe, SiteTap
from parity_audit.diagnose.decoding import (
    decoded_probes,
    identify_decoded,
    not_in,
    not_left_in_whole_runs,
    only_decoded,
    run_whole,
)
from parity_audit.diagnose.describe import Replayed, with_descriptions
from parity_audit.diagnose.evidence import evidence_by_layer
from parity_audit.diagnose.extent import with_extents
from parity_audit.diagnose.findings import says_nothing, unexplained
from parity_audit.diagnose.fit.sides import inputs_of_sites
from parity_audit.diagnose.fitting import causes_at
from parity_audit.diagnose.localise import component_of, origins, suspects
from parity_audit.diagnose.misreported import misreported, without
from parity_audit.diagnose.narrow import follows_from, hidden_by_dtype, narrow_dtype
from parity_audit.diagnose.numerics import hidden_by_tf32, of_that_size, tf32_finding
from parity_audit.diagnose.replay import Introduced, Judging, Replays, Sides, introduced
from parity_audit.diagnose.routing import route_of
from parity_audit.specs.view import dims

DETAIL_SITES = (
    "kv_latent", "q", "k", "v", "q_norm.out", "k_norm.out", "rot_q", "rot_k", "z", "z_gated", *DELTA_SITES,
)  # fmt: skip
"""Of a block in which a long text departs: what attention is made of, and its result, but for the matrices between them."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, with the introduced ratios that led there."""

    findings: tuple[Finding, ...]
    introduced: dict[tuple[str, str], float]
    not_tested: tuple[NotTested, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate against its reference: sessions to ask, captures to read, and a place for new ones.

    `judge` is the session that replays in float64. `definition` is its native run where the reference does not compute
    the same function: then rounding is the definition's, and the reference is a suspect as well. `thorough`: look also
    where known causes would hide others (see `diagnose`). `replays` are shared by the diagnoses of one reference: what the
    judge made of a run need not be made twice.
    """

    candidate: Session
    reference: Session
    judge: Session
    candidate_capture: Capture
    reference_capture: Capture
    comparison: Comparison
    probes: tuple[Probe, ...]
    dtype: str
    out: Path
    definition: Capture | None = None
    thorough: bool = False
    replays: Replays = field(default_factory=dict)

    @property
    def judging(self) -> Judging:
        """Who replays, and where the replays go."""
        return Judging(
            judge=self.judge, dtype=self.dtype, out=self.out, made=self.replays, route=route_of(self.judge.plan)
        )


def diagnose(case: Case) -> Diagnosis:
    """Localise, then identify. Where TF32 alone explains the size of the difference, nothing else is searched for:
    the repair switches it off and looks again.

    Probes with every site are replayed as they are. A probe that captures the residual stream alone is long, or was cut
    down for a large model, so it is dear to run once more with the attention's inputs and outputs. That is done when the
    other probes show nothing: what they explain is repaired first, and what only length shows is left for the next round.
    Decoded tokens likewise are fitted by themselves only for components that are right in whole runs. Where a cause cannot
    be repaired there is no next round that is free of it; a `thorough` diagnosis looks at long, padded and decoded probes
    all the same.
    """
    coarse = tf32_finding(
        case.candidate.description(), case.reference.description(), case.comparison.sites,
        device=case.candidate.plan.device, dtype=case.dtype,
    )  # fmt: skip
    if coarse is not None and of_that_size(case.comparison.sites):
        return Diagnosis(findings=(coarse,), introduced={}, not_tested=(hidden_by_tf32(),))
    narrow = narrow_dtype(case.candidate_capture, case.reference_capture, case.dtype)
    gaps = [] if narrow is None else [hidden_by_dtype(narrow.dtype)]
    case = case if narrow is None else replace(case, dtype=narrow.dtype)
    shown = _shown(case)
    found, unread = _causes(case, shown)
    described, undescribed = _described(case, shown, found)
    held = [(one.sides.candidate, one.replayed) for one in shown.seen]
    placed, unplaced = with_extents(described, held, case.dtype)
    placed = [item for item in placed if not follows_from(narrow, item) and not says_nothing(item)]
    return Diagnosis(
        findings=(*([coarse] if coarse else []), *shown.hooks, *placed), introduced=shown.ratios,
        not_tested=(*gaps, *shown.gaps, *unread, *undescribed, *unplaced),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What the replays show: introduced ratios by (probe, site), of all replays; hooks that show something else than the model
    computes; the replays, the first that of the wide probes; what could not be looked at."""

    ratios: dict[tuple[str, str], float]
    hooks: Sequence[Finding]
    seen: Sequence[Introduced]
    gaps: Sequence[NotTested]


def _shown(case: Case) -> _Shown:
    """Replay the probes that show every site, and in detail those of the others that may show more."""
    wide = tuple(probe for probe in case.probes if probe.sites == "all")
    own = Sides(
        candidate=case.candidate_capture, reference=case.reference_capture, definition=case.definition
    )  # fmt: skip
    first = introduced(case.judging, wide, own, "replay")
    hooks = misreported(first.sides.candidate, first.replayed, first.ratios, case.dtype)
    ratios, seen, gaps = dict(first.ratios), [first], []
    for probe in _to_detail(case, wide, found=bool(suspects(without(ratios, hooks)))):
        detail = _detail_within(case, probe)
        if isinstance(detail, NotTested):
            gaps.append(detail)
        else:
            ratios.update(detail.ratios)
            seen.append(detail)
    return _Shown(ratios=without(ratios, hooks), hooks=hooks, seen=seen, gaps=gaps)


def _causes(case: Case, shown: _Shown) -> tuple[list[Finding], list[NotTested]]:
    """Causes in whole runs, then those that decoded tokens alone show, then what has none; and what could not be read."""
    plan = case.reference.plan
    candidate = evidence_by_layer("candidate", [one.sides.candidate for one in shown.seen], plan, case.dtype)
    reference = evidence_by_layer("reference", [one.sides.reference for one in shown.seen], plan, case.dtype)
    wrong_sites = partial(origins, inputs_of=inputs_of_sites(reference))
    decoded = decoded_probes(case.probes)
    whole, steps = ({place: ratio for place, ratio in shown.ratios.items() if (place[0] in decoded) is side}
                    for side in (False, True))  # fmt: skip
    everywhere = set(suspects(whole))
    findings, missing = causes_at(run_whole(candidate), run_whole(reference), wrong_sites(whole))
    asked = set(suspects(steps)) if case.thorough else only_decoded(suspects(shown.ratios), everywhere)
    wrong = not_left_in_whole_runs(
        [site for site in wrong_sites(steps) if component_of(site) in asked], wrong_sites(whole), findings
    )
    departing = {probe for (probe, site), ratio in steps.items() if site in wrong and ratio > limit_of(site)}
    later, more = identify_decoded(candidate, reference, wrong, findings, departing)
    findings = [*findings, *not_in(findings, later, everywhere)]
    return [*findings, *unexplained(wrong_sites(shown.ratios), findings)], [*missing, *more]


def _described(case: Case, shown: _Shown, found: Sequence[Finding]) -> tuple[list[Finding], list[NotTested]]:
    """The findings with what can be said where no constant is known, and what broke off. A site is described by the first replay in
    which it is wrong: a long text shows tokens that the others do not have."""
    d_head = dims(case.reference.plan.spec, case.reference.plan.config).get("d_head", 0)
    told, gaps, wrong_before = list(found), [], frozenset[str]()
    for one in shown.seen:
        own = {probe.name for probe in one.replayed.probes}
        here = {
            place: ratio for place, ratio in shown.ratios.items() if place[0] in own and place[1] not in wrong_before
        }
        sides = Replayed(own=one.sides.candidate, true=one.replayed, ratios=here, d_head=d_head)
        told, more = with_descriptions(told, sides)
        gaps += more
        wrong_before |= {site for (_, site), ratio in here.items() if ratio > limit_of(site)}
    return told, gaps


def _to_detail(case: Case, wide: Sequence[Probe], *, found: bool) -> list[Probe]:
    """Probes of the residual stream alone that the floor does not explain: all of them where the wide ones show nothing;
    where those show something, only longer, padded and decoded ones can add to it, and only a thorough diagnosis asks for that."""
    wrong = {
        delta.probe for delta in case.comparison.by_probe if share_of_limit(delta) > 1.0 and delta.site != RETURNED
    }
    narrow = [probe for probe in case.probes if probe.sites != "all" and probe.name in wrong]
    longest = max((probe.shape[1] for probe in wide), default=0)

    def adds(probe: Probe) -> bool:
        padded = any(0 in row for row in probe.mask)
        return probe.shape[1] > longest or padded or probe.decode_from is not None

    return [probe for probe in narrow if not found or (case.thorough and adds(probe))]


def _layers_to_detail(comparison: Comparison, probe: Probe) -> set[int]:
    """Every layer with a diverging site on this probe; errors are inherited, so later layers come along."""
    wrong = [delta for delta in comparison.by_probe if delta.probe == probe.name and share_of_limit(delta) > 1.0]
    return {layer for delta in wrong if (layer := layer_of(delta.site)) is not None}


def _detail_within(case: Case, probe: Probe) -> Introduced | NotTested:
    """As `_detail`, in every position; a gap where `--disk` leaves no room for it."""
    what = f"causes that probe {probe.name} alone shows"
    try:
        return _detail(case, replace(probe, kept=()), _layers_to_detail(case.comparison, probe))
    except NotJudged as error:
        if error.code != DISK_BOUND:
            raise
        return NotTested(what=what, why=error.message)


def _detail(case: Case, probe: Probe, layers: set[int]) -> Introduced:
    """Capture the attention of these layers on a probe without it, on every side, and replay it."""

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return wanted(tap, probe) or (layer_of(tap.site) in layers and local_name(tap.site) in DETAIL_SITES)

    def detailed(side: str, session: Session) -> Capture:
        return take_capture(session, [probe], case.out / f"detail-{side}-{probe.name}", choose=choose)

    own = Sides(
        candidate=detailed("candidate", case.candidate), reference=detailed("reference", case.reference),
        definition=detailed("definition", case.judge) if case.definition is not None else None,
    )  # fmt: skip
    return introduced(case.judging, [probe], own, f"replay-{probe.name}", choose)
