"""One candidate from its first capture to its verified patch."""

from __future__ import annotations

import dataclasses
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import Capture
from parity_audit.compare.deltas import Comparison
from parity_audit.compare.processing import allowance
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Candidate, Finding, Verdict
from parity_audit.core.types import NotTested
from parity_audit.diagnose.diagnosis import Case, Diagnosis, diagnose
from parity_audit.diagnose.localise import with_introduced
from parity_audit.diagnose.repeat import repeat_finding
from parity_audit.diagnose.weights import grouped, without_consequences
from parity_audit.repair.choose import Proposal, no_patch, propose
from parity_audit.repair.first_look import first_look, with_hooks, with_limits
from parity_audit.repair.prove import Trial, prove, wants_proof
from parity_audit.repair.reference import Reference
from parity_audit.repair.right_reference import RightReferences, confirmed, judged_for_the_rest, left_to_prove
from parity_audit.repair.verify import Bench, Verified, changes_nothing, merge_fixes, needed, run_patched, with_places
from parity_audit.specs.view import dims, knob_values, roles

MAX_ROUNDS = 3
UNSTEADY = "no setting is known for it: put the model into eval mode, and look for what draws random numbers"
IDLE = "its setting has the right value already: what this port computes does not come from there"
STUCK = (
    "its setting was changed and read back, and the activations still say the same: this port's code does not use it"
)
PROCESSED = "processed weights cannot be replayed; audit the same port without processing, where they can"


@dataclass
class _State:
    """What is known of a candidate as its faults are peeled off."""

    findings: list[Finding] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    gaps: list[NotTested] = field(default_factory=list)
    stuck: set[str] = field(default_factory=set)
    match_reference: bool = False
    verified: Verified | None = None


def audit_candidate(
    session: Session, capture: Capture, reference: Reference, *, target: float, repair: bool, hooks: bool, out: Path,
    rights: RightReferences | None,
) -> Candidate:  # fmt: skip
    """One candidate's result, tensors that are wrong in the same way together: see `_audited`."""
    result = _audited(session, capture, reference, target=target, repair=repair, hooks=hooks, out=out, rights=rights)
    gaps = tuple(dict.fromkeys(result.not_tested))
    return dataclasses.replace(result, findings=tuple(grouped(result.findings)), not_tested=gaps)


def _audited(
    session: Session, capture: Capture, reference: Reference, *, target: float, repair: bool, hooks: bool, out: Path,
    rights: RightReferences | None,
) -> Candidate:  # fmt: skip
    """Compare a capture and, on a mismatch, diagnose, repair and verify; with `hooks`, edit a good port's hooks.

    Where the reference departs from the spec, repairs are judged against one of `rights`; without them the candidate is
    patched to do what the given reference does.

    Raises:
        NotJudged: a backend failed; what it captured before stays on disk.
    """
    plan = session.plan
    allowed = allowance(session.description().processing, knob_values(plan.spec, plan.config))
    comparison = reference.compared(capture, allowed)
    verdict, why = judge_comparison(comparison)
    result = with_limits(
        first_look(session, capture, comparison, verdict, why, reference, allowed), comparison, reference
    )
    if allowed is not None and verdict is Verdict.MISMATCH:
        return dataclasses.replace(result, not_tested=(*result.not_tested, NotTested(what="causes", why=PROCESSED)))
    if verdict is not Verdict.MISMATCH:
        return with_hooks(result, session, capture, reference, out / "hooks") if hooks else result
    try:
        unsteady = repeat_finding(session, capture, plan.dtype, out / "again")
        if unsteady is not None:
            gaps = (
                NotTested(what="causes", why="two runs of the same tokens differ"),
                no_patch(unsteady.knob, UNSTEADY),
            )
            return dataclasses.replace(
                result,
                findings=(*result.findings, unsteady),
                why=unsteady.message,
                not_tested=(*result.not_tested, *gaps),
            )
        diagnosis = _diagnose(session, reference, capture, comparison, out / "diagnosis-0")
    except Exception as error:
        return _broken_off(result, "diagnosis", error, session)
    result = _with_diagnosis(result, comparison, diagnosis, reference.session.plan)
    if rights is not None:
        result, reference = judged_for_the_rest(result, capture, reference, rights, allowed, run=repair)
    if not repair:
        untried = (*result.not_tested, NotTested(what="repair", why="switched off with --no-repair"))
        return dataclasses.replace(result, not_tested=untried)
    bench = Bench(
        reference=reference.capture,
        judge=reference.judge,
        definition=reference.definition,
        probes=reference.probes,
        dtype=reference.dtype,
        target=target,
    )
    state = _State(findings=[*result.findings], match_reference=rights is None)
    try:
        _peel(session, reference, bench, state, out)
    except Exception as error:
        result = _broken_off(result, "repair", error, session)
    return confirmed(_with_proof(_with_repair(result, state), session, capture, reference, state, out))


def _broken_off(result: Candidate, stage: str, error: Exception, session: Session) -> Candidate:
    """A verdict stands although a later stage failed; what failed is in the report, its traceback in the log."""
    with session.log.open("a") as log:
        traceback.print_exception(error, file=log)
    why = f"broke off with {type(error).__name__}: {error} (see {session.log})"
    return dataclasses.replace(result, not_tested=(*result.not_tested, NotTested(what=stage, why=why)))


def _diagnose(session: Session, reference: Reference, capture: Capture, comparison: Comparison, out: Path) -> Diagnosis:
    return diagnose(
        Case(
            candidate=session, reference=reference.session, candidate_capture=capture,
            judge=reference.judging, definition=reference.definition, reference_capture=reference.capture,
            comparison=comparison, probes=reference.probes, dtype=reference.dtype, out=out,
        )
    )  # fmt: skip


def _peel(session: Session, reference: Reference, bench: Bench, state: _State, out: Path) -> None:
    """Patch what is known, look again at what is left, until parity, nothing new, or too many rounds."""
    new = list(state.findings)
    for number in range(1, MAX_ROUNDS + 1):
        version = session.description().version
        proposals, gaps = propose(
            new, session.plan, version, known=state.findings, match_reference=state.match_reference
        )
        state.gaps += gaps
        if not proposals:
            return
        state.proposals, missing = with_places(session, _replaced(state.proposals, proposals))
        state.gaps += missing
        if not state.proposals:
            return
        state.verified = run_patched(session, state.proposals, bench, out / f"patched-{number}")
        if state.verified.patched.verdict in (Verdict.PARITY, Verdict.EXACT):
            _shrink(session, bench, state, out)
            return
        left = _diagnose(
            session, reference, state.verified.capture, state.verified.comparison, out / f"diagnosis-{number}"
        )
        known = {(finding.knob, finding.layers) for finding in state.findings}
        new = [finding for finding in left.findings if (finding.knob, finding.layers) not in known]
        patched = {proposal.knob for proposal in state.proposals}
        state.stuck = {item.knob for item in left.findings if (item.knob, item.layers) in known} & patched
        state.findings = _still_true(state.findings, left.findings) + new


def _replaced(old: list[Proposal], new: list[Proposal]) -> list[Proposal]:
    knobs = {proposal.knob for proposal in new}
    return [proposal for proposal in old if proposal.knob not in knobs] + new


def _still_true(findings: list[Finding], left: tuple[Finding, ...]) -> list[Finding]:
    """An unexplained remainder of an earlier round is settled by what this round says about it."""
    remains = {finding.site for finding in left if finding.kind == "unexplained"}
    return [finding for finding in findings if finding.kind != "unexplained" or finding.site in remains]


def _shrink(session: Session, bench: Bench, state: _State, out: Path) -> None:
    """Keep the patches that are needed, and only the findings that a needed patch confirms."""
    kept = needed(session, state.proposals, bench, out)
    if len(kept) < len(state.proposals):
        dropped = {proposal.knob for proposal in state.proposals} - {proposal.knob for proposal in kept}
        state.gaps += [
            NotTested(
                what=f"finding {knob}", why="fitted, but undoing its patch does not move the outputs beyond the floor"
            )
            for knob in sorted(dropped)
        ]
        state.findings = [finding for finding in state.findings if finding.knob not in dropped]
        state.proposals = kept
        state.verified = run_patched(session, kept, bench, out / "patched")
    state.findings = [finding for finding in state.findings if finding.kind != "unexplained"]


def _with_repair(result: Candidate, state: _State) -> Candidate:
    verified = state.verified
    if verified is None:
        return dataclasses.replace(result, findings=tuple(state.findings), not_tested=(*result.not_tested, *state.gaps))
    idle = [patch for patch in verified.patches if changes_nothing(patch)]
    stuck = [patch for patch in verified.patches if patch.knob in state.stuck and patch not in idle]
    gaps = [no_patch(patch.knob, IDLE) for patch in idle] + [no_patch(patch.knob, STUCK) for patch in stuck]
    patches = merge_fixes([patch for patch in verified.patches if patch not in idle and patch not in stuck])
    return dataclasses.replace(
        result, findings=tuple(state.findings), patches=patches, patched=verified.patched if patches else None,
        not_tested=(*result.not_tested, *state.gaps, *gaps),
    )  # fmt: skip


def _with_proof(
    result: Candidate, session: Session, capture: Capture, reference: Reference, state: _State, out: Path
) -> Candidate:
    """The diagnosis proved on the reference, where no patch has proved it, or where the reference is wrong."""
    verified, patched = state.verified, result.patched.verdict if result.patched else None
    open_findings = left_to_prove(result)
    if reference.judge is None or not wants_proof(open_findings, patched):
        return result
    trial = Trial(
        reference=reference.judging, probes=reference.probes, dtype=reference.dtype, shipped=capture, before=result.logits,
        out=out / "proof", who=_who(reference), patched=verified.capture if verified else None,
        patched_knobs=frozenset(proposal.knob for proposal in state.proposals) if verified else frozenset(),
    )  # fmt: skip
    session.release()
    unpatched = {finding.knob for finding in open_findings} - {proposal.knob for proposal in state.proposals}
    try:
        proof = prove(trial, open_findings, sorted(unpatched))
    except Exception as error:
        return _broken_off(result, "proof", error, session)
    if isinstance(proof, NotTested):
        return dataclasses.replace(result, not_tested=(*result.not_tested, proof))
    return dataclasses.replace(result, proof=proof)


def _who(reference: Reference) -> str:
    """Whom a proof gives the candidate's constants to."""
    return "the reference" if reference.judging is reference.session else f"the judge ({reference.judging.label})"


def _with_diagnosis(result: Candidate, comparison: Comparison, diagnosis: Diagnosis, plan: SidePlan) -> Candidate:
    places = (None, *range(dims(plan.spec, plan.config)["n_layers"]))
    tensors = {(role, at): tap.path for at in places for role, tap in roles(plan.spec, plan.config, at).items()}
    own = without_consequences(diagnosis.findings, result.findings, tensors)
    return dataclasses.replace(
        result,
        sites=with_introduced(comparison.sites, diagnosis.introduced),
        findings=(*result.findings, *own),
        not_tested=(*result.not_tested, *diagnosis.not_tested),
    )
