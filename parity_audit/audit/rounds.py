"""Find several faults of one candidate: patch those that can be patched, diagnose the patched model again, and repeat.

A fault that no setting of the candidate repairs stays in every later run. It does not end the search: localisation
replays every component on the candidate's own input, so it still shows which of the other components are wrong. From then
on every diagnosis is thorough: it examines long probes and decoded tokens even if other probes show causes already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from parity_audit.audit.reference import Reference
from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import Capture
from parity_audit.checks.weights import without_consequences
from parity_audit.compare.deltas import Comparison
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Candidate, Finding, Verdict
from parity_audit.core.types import KnobValue, NotTested
from parity_audit.diagnose.decoding import says_the_same
from parity_audit.diagnose.diagnosis import Case, Diagnosis, diagnose
from parity_audit.repair.choose import Proposal, no_patch, propose
from parity_audit.repair.rewrite import next_value
from parity_audit.repair.verify import (
    PatchJudge,
    Verified,
    changes_nothing,
    merge_fixes,
    moves_outputs,
    needed,
    run_patched,
    with_live_setting,
)
from parity_audit.specs.view import dims, roles

MAX_ROUNDS = 5
"""The largest number of rounds: three faults, one of them unpatchable, need four.

A round is a patched run, if there is a new patch, and a diagnosis of the latest run.
"""
GOOD = (Verdict.PARITY, Verdict.EXACT)
IDLE = "its setting has the right value already: what this port computes does not come from there"
STUCK = "its setting was changed and read back, and not one output moved: this port's code does not use it"
USED = (
    "its setting was changed and the outputs moved, so it is used; what the activations say is not right all the same"
)


@dataclass
class State:
    """What is known about a candidate while its faults are found and patched, one round after another.

    `rewritten` are the second values of patched knobs whose right value did not repair them. `stuck` are the patched knobs
    that could not be repaired, each with the reason. `verified` is the last patched run.
    """

    findings: list[Finding] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    gaps: list[NotTested] = field(default_factory=list)
    rewritten: dict[str, KnobValue] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    match_reference: bool = False
    verified: Verified | None = None

    @property
    def lasting(self) -> bool:
        """Return whether a cause cannot be patched, so that it is present in every run of the candidate."""
        patched = {proposal.knob for proposal in self.proposals} - self.stuck.keys()
        own = (item for item in self.findings if self.match_reference or item.departs_from_spec != "reference")
        return any(item.knob not in patched for item in own)

    @property
    def useless(self) -> dict[str, str]:
        """Return the patched knobs whose patch changes no setting or does not remove the error, each with the reason."""
        if self.verified is None:
            return {}
        idle = {patch.knob: IDLE for patch in self.verified.patches if changes_nothing(patch)}
        return {**{knob: why for knob, why in self.stuck.items() if knob in self.verified.knobs}, **idle}

    @property
    def took(self) -> frozenset[str]:
        """Return the knobs that the patches now in force have repaired."""
        known = self.verified.knobs if self.verified else set()
        return frozenset(known - self.useless.keys())


@dataclass(frozen=True, kw_only=True)
class RepairCase:
    """One candidate under repair: its session, the reference it is judged against, and its run as shipped."""

    session: Session
    reference: Reference
    target: float
    capture: Capture
    comparison: Comparison
    out: Path

    @property
    def bench(self) -> PatchJudge:
        """Return what patched runs are judged against: the reference before it took over the candidate's choice of experts.

        A patched candidate may choose other experts than the candidate as shipped, so its own choices are followed anew.
        """
        reference = self.reference.plain or self.reference
        return PatchJudge(
            reference=reference.capture, judge=reference.judge, definition=reference.definition,
            judging=reference.session if reference.can_follow else None,
            probes=reference.probes, dtype=reference.dtype, target=self.target,
        )  # fmt: skip

    def against(self, reference: Reference) -> RepairCase:
        """Return the same run, compared with another reference."""
        if reference is self.reference:
            return self
        return replace(self, reference=reference, comparison=reference.compared(self.capture))


def diagnosed(case: RepairCase, capture: Capture, comparison: Comparison, name: str, *, thorough: bool) -> Diagnosis:
    """Diagnose one run of the candidate, as shipped or patched."""
    reference = case.reference
    return diagnose(
        Case(
            candidate=case.session, reference=reference.session, candidate_capture=capture,
            judge=reference.judging, definition=reference.definition, reference_capture=reference.capture,
            comparison=comparison, probes=reference.probes, dtype=reference.dtype, out=case.out / name, thorough=thorough,
            replays=reference.replays,
        )
    )  # fmt: skip


def peel(case: RepairCase, state: State) -> None:
    """Patch the known causes and diagnose the rest, until parity or until a thorough diagnosis finds nothing new."""
    # The reference was wrong, and the candidate agrees with its replacement.
    if judge_comparison(case.comparison)[0] in GOOD:
        return
    new, thorough = list(state.findings), False
    for number in range(1, MAX_ROUNDS + 1):
        if _patched(case, state, new, f"patched-{number}"):
            assert state.verified is not None
            if state.verified.patched.verdict in GOOD:
                _shrink(case, state)
                return
        elif thorough:
            return
        thorough = state.lasting or not new
        new = _looked_again(case, state, f"diagnosis-{number}", thorough=thorough)


def _patched(case: RepairCase, state: State, new: Sequence[Finding], name: str) -> bool:
    """Propose patches for new findings, and apply and run them together with the earlier ones.

    Return False, without a run, if no patch is known for these findings or the model has no place for any of them.
    """
    version = case.session.description().release
    proposals, gaps = propose(
        new, case.session.plan, version, known=state.findings, rewritten=state.rewritten,
        match_reference=state.match_reference,
    )  # fmt: skip
    state.gaps += gaps
    if not proposals:
        return False
    state.proposals, missing = with_live_setting(case.session, _replaced(state.proposals, proposals))
    state.gaps += missing
    if not {proposal.knob for proposal in proposals} & {proposal.knob for proposal in state.proposals}:
        return False
    state.verified = run_patched(case.session, state.proposals, case.bench, case.out / name)
    return True


def _looked_again(case: RepairCase, state: State, name: str, *, thorough: bool) -> list[Finding]:
    """Diagnose the latest run, and return the findings to patch next.

    These are the findings that were not known, and the known ones whose patch is to write another value.
    """
    seen = state.verified
    capture, comparison = (seen.capture, seen.comparison) if seen else (case.capture, case.comparison)
    left = diagnosed(case, capture, comparison, name, thorough=thorough)
    state.gaps += left.not_tested
    own = own_causes(left.findings, state.findings, case.reference.session.plan)
    new = [item for item in own if not any(_known(item, other) for other in state.findings)]
    again = [item for item in own if item not in new]
    rewritten = _rewritten(case, state, again)
    state.findings = _still_true(state.findings, left.findings) + new
    return new + [item for item in state.findings if item.knob in rewritten]


def own_causes(found: Sequence[Finding], known: Sequence[Finding], plan: SidePlan) -> list[Finding]:
    """Return the findings without those that only follow from tensors that are known to be wrong."""
    return without_consequences(found, known, tensors_of_roles(plan))


def tensors_of_roles(plan: SidePlan) -> dict[tuple[str, int | None], str]:
    """Return the name of the checkpoint's tensor for every (role, layer); layer None stands for tensors outside the blocks."""
    places = (None, *range(dims(plan.spec, plan.config)["n_layers"]))
    return {(role, at): tap.path for at in places for role, tap in roles(plan.spec, plan.config, at).items()}


def _known(found: Finding, known: Finding) -> bool:
    """Return whether an earlier round has reported a finding already.

    It has if both name the same knob and value, in layers of which one finding contains the other's. If both have the same
    extent (such as "from position 20 on"), the same knob in the same layers is enough, whatever the value.
    """
    if found.evidence.get("extent") != known.evidence.get("extent"):
        return says_the_same(found, known)
    return found.knob == known.knob and (found.layers == known.layers or says_the_same(found, known))


def _rewritten(case: RepairCase, state: State, again: Sequence[Finding]) -> set[str]:
    """Give patched knobs that a diagnosis still finds wrong another value, and return the knobs that were given one.

    The new value follows from the value that was written and the value that was fitted afterwards (see `repair.rewrite`). A
    knob is given another value once. If it is wrong again, or if there are no numbers to compute a value from, it is stuck.
    """
    patches = {} if state.verified is None else {patch.knob: patch for patch in state.verified.patches}
    changed: set[str] = set()
    for knob in dict.fromkeys(item.knob for item in again if item.knob in patches):
        finding = next(item for item in again if item.knob == knob)
        value = None if knob in state.rewritten else next_value(patches[knob], finding, state.match_reference)
        if value is not None:
            state.rewritten[knob] = value
            changed.add(knob)
        elif changes_nothing(patches[knob]):
            state.stuck[knob] = IDLE
        elif knob not in state.stuck:
            state.stuck[knob] = _why_stuck(case, state, knob)
    return changed


def _why_stuck(case: RepairCase, state: State, knob: str) -> str:
    """Return why a patch did not work: whether the changed setting moves the outputs at all, or the code does not use it."""
    assert state.verified is not None
    moved = moves_outputs(case.session, state.proposals, knob, state.verified.capture, case.out / f"unused-{knob}")
    return USED if moved else STUCK


def _replaced(old: list[Proposal], new: list[Proposal]) -> list[Proposal]:
    knobs = {proposal.knob for proposal in new}
    return [proposal for proposal in old if proposal.knob not in knobs] + new


def _still_true(findings: list[Finding], left: tuple[Finding, ...]) -> list[Finding]:
    """Return the findings without the unexplained ones at sites where the latest diagnosis finds nothing unexplained."""
    remains = {finding.site for finding in left if finding.kind == "unexplained"}
    return [finding for finding in findings if finding.kind != "unexplained" or finding.site in remains]


def _shrink(case: RepairCase, state: State) -> None:
    """Drop the patches that parity does not need, their findings, and all unexplained findings."""
    kept = needed(case.session, state.proposals, case.bench, case.out)
    if len(kept) < len(state.proposals):
        dropped = {proposal.knob for proposal in state.proposals} - {proposal.knob for proposal in kept}
        why = "fitted, but undoing its patch does not move the outputs beyond the floor"
        state.gaps += [NotTested(what=f"finding {knob}", why=why) for knob in sorted(dropped)]
        state.findings = [finding for finding in state.findings if finding.knob not in dropped]
        state.proposals = kept
        state.verified = run_patched(case.session, kept, case.bench, case.out / "patched")
    state.findings = [finding for finding in state.findings if finding.kind != "unexplained"]


def with_repair(result: Candidate, state: State) -> Candidate:
    """Return the result with the findings of all rounds, the patches that worked, and the reasons why others did not."""
    verified = state.verified
    if verified is None:
        return replace(result, findings=tuple(state.findings), not_tested=(*result.not_tested, *state.gaps))
    patches = merge_fixes([patch for patch in verified.patches if patch.knob in state.took])
    return replace(
        result, findings=tuple(state.findings), patches=patches, patched=verified.patched if patches else None,
        not_tested=(*result.not_tested, *state.gaps, *(no_patch(knob, why) for knob, why in state.useless.items())),
    )  # fmt: skip
