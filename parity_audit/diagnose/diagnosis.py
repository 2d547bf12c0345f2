"""Turn a mismatch into findings: replay each side on its own inputs, select the wrong components, and fit their
constants on both sides."""

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
    only_decoded,
    run_whole,
    without_unexplained_in_whole_runs,
)
from parity_audit.diagnose.describe import Replayed, with_descriptions
from parity_audit.diagnose.evidence import evidence_by_layer
from parity_audit.diagnose.extent import with_extents
from parity_audit.diagnose.findings import is_equivalent_implementation, unexplained
from parity_audit.diagnose.fit.sides import inputs_of_sites
from parity_audit.diagnose.fitting import causes_at
from parity_audit.diagnose.forms.elementwise import ACTIVATION
from parity_audit.diagnose.localise import component_of, origins, suspects
from parity_audit.diagnose.misreported import misreported, without
from parity_audit.diagnose.narrow import follows_from, hidden_by_dtype, narrow_dtype
from parity_audit.diagnose.numerics import hidden_by_tf32, of_that_size, tf32_finding
from parity_audit.diagnose.replay import Introduced, Judging, Replays, Sides, introduced
from parity_audit.diagnose.routing import route_of
from parity_audit.specs.view import dims, spec_values

DETAIL_SITES = (
    "kv_latent", "q", "k", "v", "q_norm.out", "k_norm.out", "rot_q", "rot_k", "z", "z_gated", *DELTA_SITES,
)  # fmt: skip
"""Sites that are captured, in addition, in the blocks where a long probe diverges: the inputs of attention and its
result, but not the attention matrices between them."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings, the introduced ratio of every (probe, site) that led to them, and what was not tested."""

    findings: tuple[Finding, ...]
    introduced: dict[tuple[str, str], float]
    not_tested: tuple[NotTested, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate and its reference: their sessions, their captures, and a folder for new captures.

    `judge` is the session that replays in float64. `definition` is the judge's native run, given if the reference does
    not compute the same function as the definition: then the definition's rounding is the floor, and the reference is a
    suspect as well. `thorough` also looks where known causes would hide others (see `diagnose`). `replays` holds the
    judge's replays and is shared by all diagnoses of one reference, so that no replay is made twice.
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
        """The judge and the settings of its replays."""
        return Judging(
            judge=self.judge, dtype=self.dtype, out=self.out, made=self.replays, route=route_of(self.judge.plan)
        )


def diagnose(case: Case) -> Diagnosis:
    """Localise the components that introduce error, then identify their causes.

    If TF32 alone explains the size of the difference, nothing else is searched for: the repair switches TF32 off and
    runs the diagnosis again.

    Probes that capture every site are replayed as they are. A probe that captures only the residual stream is long, or
    was reduced for a large model, so it is expensive to run again with the inputs and outputs of attention. That is
    done only if the other probes show nothing: the causes that they show are repaired first, and causes that show only
    in long texts are left for the next round. For the same reason decoded tokens are fitted by themselves only for
    components that are right in whole runs. If a cause cannot be repaired, no later round is free of it; a `thorough`
    diagnosis therefore looks at long, padded and decoded probes in any case.
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
    placed = [item for item in placed if not follows_from(narrow, item) and not is_equivalent_implementation(item)]
    return Diagnosis(
        findings=(*([coarse] if coarse else []), *shown.hooks, *placed), introduced=shown.ratios,
        not_tested=(*gaps, *shown.gaps, *unread, *undescribed, *unplaced),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """The result of the replays.

    `ratios`: introduced ratios by (probe, site), over all replays. `hooks`: findings about hooks that show another
    tensor than the one the model computes with. `seen`: the replays, first that of the probes with every site. `gaps`:
    what could not be replayed.
    """

    ratios: dict[tuple[str, str], float]
    hooks: Sequence[Finding]
    seen: Sequence[Introduced]
    gaps: Sequence[NotTested]


def _shown(case: Case) -> _Shown:
    """Replay the probes that capture every site, and, with more sites, those other probes that may show further causes."""
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
    """The causes found in whole runs, those found only in decoded tokens, and the sites without a cause; also the gaps."""
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
    wrong = without_unexplained_in_whole_runs(
        [site for site in wrong_sites(steps) if component_of(site) in asked], wrong_sites(whole), findings
    )
    departing = {probe for (probe, site), ratio in steps.items() if site in wrong and ratio > limit_of(site)}
    later, more = identify_decoded(candidate, reference, wrong, findings, departing)
    findings = [*findings, *not_in(findings, later, everywhere)]
    return [*findings, *unexplained(wrong_sites(shown.ratios), findings)], [*missing, *more]


def _described(case: Case, shown: _Shown, found: Sequence[Finding]) -> tuple[list[Finding], list[NotTested]]:
    """Add descriptions to the findings where no constant explains a site; also return the gaps.

    A site is described from the first replay in which it is wrong, since a long text has tokens that the other probes
    do not have.
    """
    plan = case.reference.plan
    d_head = dims(plan.spec, plan.config).get("d_head", 0)
    activation = spec_values(plan.spec, plan.config).get(ACTIVATION)
    told, gaps, wrong_before = list(found), [], frozenset[str]()
    for one in shown.seen:
        own = {probe.name for probe in one.replayed.probes}
        here = {
            place: ratio for place, ratio in shown.ratios.items() if place[0] in own and place[1] not in wrong_before
        }
        sides = Replayed(
            own=one.sides.candidate, true=one.replayed, ratios=here, d_head=d_head, activation=activation
        )  # fmt: skip
        told, more = with_descriptions(told, sides)
        gaps += more
        wrong_before |= {site for (_, site), ratio in here.items() if ratio > limit_of(site)}
    return told, gaps


def _to_detail(case: Case, wide: Sequence[Probe], *, found: bool) -> list[Probe]:
    """The probes to replay in detail: those with the residual stream only that differ by more than the floor.

    All of them are returned if the probes with every site show nothing (`found` is false). Otherwise only longer,
    padded and decoded probes can add a cause, and they are returned only in a thorough diagnosis.
    """
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
    """Layers with a diverging site on this probe, including later layers that only inherit the error."""
    wrong = [delta for delta in comparison.by_probe if delta.probe == probe.name and share_of_limit(delta) > 1.0]
    return {layer for delta in wrong if (layer := layer_of(delta.site)) is not None}


def _detail_within(case: Case, probe: Probe) -> Introduced | NotTested:
    """Call `_detail` for the layers in which this probe diverges, with every position of the probe kept.

    Returns a `NotTested` if the space that `--disk` allows does not suffice for the capture.
    """
    what = f"causes that probe {probe.name} alone shows"
    try:
        return _detail(case, replace(probe, kept=()), _layers_to_detail(case.comparison, probe))
    except NotJudged as error:
        if error.code != DISK_BOUND:
            raise
        return NotTested(what=what, why=error.message)


def _detail(case: Case, probe: Probe, layers: set[int]) -> Introduced:
    """Capture the attention of these layers on a probe that was captured without it, on every side, and replay it."""

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return wanted(tap, probe) or (layer_of(tap.site) in layers and local_name(tap.site) in DETAIL_SITES)

    def detailed(side: str, session: Session) -> Capture:
        return take_capture(session, [probe], case.out / f"detail-{side}-{probe.name}", choose=choose)

    own = Sides(
        candidate=detailed("candidate", case.candidate), reference=detailed("reference", case.reference),
        definition=detailed("definition", case.judge) if case.definition is not None else None,
    )  # fmt: skip
    return introduced(case.judging, [probe], own, f"replay-{probe.name}", choose)
