"""Faults one after another: patch what can be patched, look again, and go on although a fault cannot be patched.

A cause that no setting of the candidate repairs stays in every later run. It does not end the search: localisation
replays every component on the candidate's own input, so the other components are still told right from wrong, and from
then on every diagnosis is thorough (long probes and decoded tokens are looked at although other probes show causes).
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
    Bench,
    Verified,
    changes_nothing,
    merge_fixes,
    moves_outputs,
    needed,
    run_patched,
    with_places,
)
from parity_audit.specs.view import dims, roles

MAX_ROUNDS = 5
"""Each round is a patched run or a thorough diagnosis; stacks of three faults, one unpatchable, need four."""
GOOD = (Verdict.PARITY, Verdict.EXACT)
IDLE = "its setting has the right value already: what this port computes does not come from there"
STUCK = "its setting was changed and read back, and not one output moved: this port's code does not use it"
USED = (
    "its setting was changed and the outputs moved, so it is used; what the activations say is not right all the same"
)


@dataclass
class State:
    """What is known of a candidate as its faults are peeled off."""

    findings: list[Finding] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    gaps: list[NotTested] = field(default_factory=list)
    rewritten: dict[str, KnobValue] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    match_reference: bool = False
    verified: Verified | None = None

    @property
    def lasting(self) -> bool:
        """Whether a cause stays in the candidate, so that a run free of it cannot be had."""
        patched = {proposal.knob for proposal in self.proposals} - self.stuck.keys()
        own = (item for item in self.findings if self.match_reference or item.departs_from_spec != "reference")
        return any(item.knob not in patched for item in own)

    @property
    def useless(self) -> dict[str, str]:
        """The patched knobs whose patches change nothing, or not what they are for, each with the reason."""
        if self.verified is None:
            return {}
        idle = {patch.knob: IDLE for patch in self.verified.patches if changes_nothing(patch)}
        return {**{knob: why for knob, why in self.stuck.items() if knob in self.verified.knobs}, **idle}

    @property
    def took(self) -> frozenset[str]:
        """The knobs that a patch in force has set right."""
        known = self.verified.knobs if self.verified else set()
        return frozenset(known - self.useless.keys())


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One candidate under repair: whom to ask, what it is judged against, and its run as shipped."""

    session: Session
    reference: Reference
    target: float
    capture: Capture
    comparison: Comparison
    out: Path

    @property
    def bench(self) -> Bench:
        """What patched runs are judged against: all that the run as shipped was, before its choices of experts were followed."""
        reference = self.reference.plain or self.reference
        return Bench(
            reference=reference.capture, judge=reference.judge, definition=reference.definition,
            judging=reference.session if reference.can_follow else None,
            probes=reference.probes, dtype=reference.dtype, target=self.target,
        )  # fmt: skip

    def against(self, reference: Reference) -> Audited:
        """The same run, judged against another reference."""
        if reference is self.reference:
            return self
        return replace(self, reference=reference, comparison=reference.compared(self.capture))


def diagnosed(case: Audited, capture: Capture, comparison: Comparison, name: str, *, thorough: bool) -> Diagnosis:
    """A diagnosis of one run of the candidate, as shipped or patched."""
    reference = case.reference
    return diagnose(
        Case(
            candidate=case.session, reference=reference.session, candidate_capture=capture,
            judge=reference.judging, definition=reference.definition, reference_capture=reference.capture,
            comparison=comparison, probes=reference.probes, dtype=reference.dtype, out=case.out / name, thorough=thorough,
            replays=reference.replays,
        )
    )  # fmt: skip


def peel(case: Audited, state: State) -> None:
    """Patch what is known and look again at what is left, until parity, or until a thorough look shows nothing new."""
    if judge_comparison(case.comparison)[0] in GOOD:  # the reference was the wrong side, and has been replaced
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


def _patched(case: Audited, state: State, new: Sequence[Finding], name: str) -> bool:
    """Whether these findings called for patches that the model has a place for; then they are in force and were run."""
    version = case.session.description().release
    proposals, gaps = propose(
        new, case.session.plan, version, known=state.findings, rewritten=state.rewritten,
        match_reference=state.match_reference,
    )  # fmt: skip
    state.gaps += gaps
    if not proposals:
        return False
    state.proposals, missing = with_places(case.session, _replaced(state.proposals, proposals))
    state.gaps += missing
    if not {proposal.knob for proposal in proposals} & {proposal.knob for proposal in state.proposals}:
        return False
    state.verified = run_patched(case.session, state.proposals, case.bench, case.out / name)
    return True


def _looked_again(case: Audited, state: State, name: str, *, thorough: bool) -> list[Finding]:
    """What this look says that was not known, and the known causes whose settings want another value."""
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
    """The findings without those that follow from tensors that are known to be wrong."""
    return without_consequences(found, known, tensors_of_roles(plan))


def tensors_of_roles(plan: SidePlan) -> dict[tuple[str, int | None], str]:
    """The checkpoint's tensor of every role in every layer; None stands for what is outside the blocks."""
    places = (None, *range(dims(plan.spec, plan.config)["n_layers"]))
    return {(role, at): tap.path for at in places for role, tap in roles(plan.spec, plan.config, at).items()}


def _known(found: Finding, known: Finding) -> bool:
    """Whether an earlier round said it: the same knob in the same layers, or the same of some of them."""
    if found.evidence.get("extent") != known.evidence.get("extent"):
        return says_the_same(found, known)
    return found.knob == known.knob and (found.layers == known.layers or says_the_same(found, known))


def _rewritten(case: Audited, state: State, again: Sequence[Finding]) -> set[str]:
    """The patched knobs that still show, given another value where what was written and what was fitted tell one.

    A knob is given another value once; one that shows after that, or without a number to go by, is stuck.
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


def _why_stuck(case: Audited, state: State, knob: str) -> str:
    """Whether a setting that was changed was used at all: its outputs with and without the change are compared."""
    assert state.verified is not None
    moved = moves_outputs(case.session, state.proposals, knob, state.verified.capture, case.out / f"unused-{knob}")
    return USED if moved else STUCK


def _replaced(old: list[Proposal], new: list[Proposal]) -> list[Proposal]:
    knobs = {proposal.knob for proposal in new}
    return [proposal for proposal in old if proposal.knob not in knobs] + new


def _still_true(findings: list[Finding], left: tuple[Finding, ...]) -> list[Finding]:
    """An unexplained remainder of an earlier round is settled by what this round says about it."""
    remains = {finding.site for finding in left if finding.kind == "unexplained"}
    return [finding for finding in findings if finding.kind != "unexplained" or finding.site in remains]


def _shrink(case: Audited, state: State) -> None:
    """Keep the patches that are needed, and only the findings that a needed patch confirms."""
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
    """The result with what peeling found: findings, the patches that took, and why others did not."""
    verified = state.verified
    if verified is None:
        return replace(result, findings=tuple(state.findings), not_tested=(*result.not_tested, *state.gaps))
    patches = merge_fixes([patch for patch in verified.patches if patch.knob in state.took])
    return replace(
        result, findings=tuple(state.findings), patches=patches, patched=verified.patched if patches else None,
        not_tested=(*result.not_tested, *state.gaps, *(no_patch(knob, why) for knob, why in state.useless.items())),
    )  # fmt: skip
