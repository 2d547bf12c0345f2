"""Audit one candidate: judge its capture, diagnose a mismatch, repair it, and verify the patch."""

from __future__ import annotations

import dataclasses
import traceback
from contextlib import ExitStack
from pathlib import Path

from parity_audit.audit.before_diagnosis import before_diagnosis, with_limits
from parity_audit.audit.centred import centred
from parity_audit.audit.hooks import AGREE, not_read, only_hooks, read_by_name, with_edits, with_names
from parity_audit.audit.reference import Reference
from parity_audit.audit.right_reference import RightReferences, confirmed, judged_for_the_rest, left_to_prove
from parity_audit.audit.rounds import RepairCase, State, diagnosed, own_causes, peel, tensors_of_roles, with_repair
from parity_audit.capture.scratch import DISK_BOUND
from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import Capture
from parity_audit.checks.folded import FOLD_LN, as_folded
from parity_audit.checks.other_checkpoint import other_checkpoint_as_one
from parity_audit.checks.own_variation import Yardstick, own_variation
from parity_audit.checks.quantised import quantised_as_one
from parity_audit.checks.repeat import DETERMINISM, STATE, UNREPEATABLE, repeat_finding
from parity_audit.checks.sharding import KIND as SHARDING
from parity_audit.checks.sharding import UNREPAIRED
from parity_audit.checks.weights import grouped, with_right_tensors, without_repeated_tensor_findings
from parity_audit.compare.deltas import Comparison
from parity_audit.compare.processing import STREAM, Allowance, allowance
from parity_audit.compare.variation import Variation
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Candidate, Finding, OwnVariation, Verdict
from parity_audit.core.sites import local_name
from parity_audit.core.types import NotTested
from parity_audit.diagnose.diagnosis import Diagnosis
from parity_audit.diagnose.localise import with_introduced
from parity_audit.repair.choose import no_patch
from parity_audit.repair.prove import Trial, prove, wants_proof
from parity_audit.specs.view import knob_values

EMBED_NORM = ("norm.embed_ln", None)
NOT_CENTRED = (
    "the norm behind the embedding gives the stream a mean, though the weights that write it are centred; audit the same port "
    "without center_writing_weights"
)


def audit_candidate(
    session: Session, capture: Capture, reference: Reference, *, target: float, repair: bool, hooks: bool, out: Path,
    rights: RightReferences | None,
) -> Candidate:  # fmt: skip
    """Return the complete result of one candidate.

    `_audited` judges, diagnoses and repairs. This function adds the check of the candidate's hooks (and, if `hooks`, the
    check that editing them has the right effect), measures how far the candidate's own runs differ from each other, and
    merges findings about tensors that are wrong in the same way.
    """
    reference = reference.following(capture, out / "choices", make_room=session.release)
    named = read_by_name(session, capture, reference, out / "hooks-by-name")
    allowed = _allowance(session, capture, reference)
    if allowed is not None:
        session.plan = dataclasses.replace(session.plan, left_out=allowed.dropped)
        capture = capture.where(lambda entry: local_name(entry.site) not in allowed.dropped)
    comparison = reference.compared(capture, allowed)
    variation, own, gaps = _own_variation(session, capture, reference, allowed, out / "own-variation")
    comparison = dataclasses.replace(comparison, variation=variation, not_tested=(*comparison.not_tested, *gaps))
    hooks_alone = only_hooks(comparison, named)
    result = _audited(
        session, capture, reference, comparison, allowed, seek_causes=not hooks_alone, target=target, repair=repair,
        out=out, rights=rights,
    )  # fmt: skip
    if any(finding.knob in (DETERMINISM, STATE) for finding in result.findings):
        named = not_read("runs of this model differ, so that no hook can be held against an earlier run")
    agree = hooks_alone or result.verdict in AGREE
    if hooks:
        result = with_edits(result, named, session, capture, reference, out / "hooks", agree=agree)
    result = with_names(result, named, agree=agree)
    roles = tensors_of_roles(session.plan)
    compared = () if allowed is not None and allowed.weights is None else capture.manifest.weights
    findings = with_right_tensors(without_repeated_tensor_findings(grouped(result.findings), roles), compared, roles)
    findings = quantised_as_one(other_checkpoint_as_one(findings, compared))
    return dataclasses.replace(
        result, findings=tuple(findings), not_tested=tuple(dict.fromkeys(result.not_tested)),
        warnings=(*result.warnings, *reference.followed), own_variation=own,
    )  # fmt: skip


def _allowance(session: Session, capture: Capture, reference: Reference) -> Allowance | None:
    """Return which sites the processing of the candidate's weights may change; None if the weights are not processed.

    The processing is taken from the backend's own description. If the description names none, the tensors are checked for
    norm weights that were folded into the next projections.
    """
    plan = session.plan
    said, knobs = session.description().processing, knob_values(plan.spec, plan.config)
    if said:
        return allowance(said, knobs)
    folded = as_folded(plan, reference.capture.manifest.weights, capture.manifest.weights)
    return None if folded is None else allowance((FOLD_LN,), knobs, folded)


def _own_variation(
    session: Session, capture: Capture, reference: Reference, allowed: Allowance | None, out: Path
) -> tuple[Variation, OwnVariation | None, tuple[NotTested, ...]]:
    """Measure how far the candidate's own runs of the same tokens differ, in multiples of the noise floor.

    Nothing is measured without a judge, because there is no noise floor then, nor for processed weights, because the
    candidate's activations are in other coordinates than the floor.
    """
    if reference.judge is None or allowed is not None:
        return Variation(), None, ()
    yardstick = Yardstick(reference=reference.floor, judge=reference.judge, dtype=reference.dtype)
    return own_variation(session, capture, yardstick, out)


def _audited(
    session: Session, capture: Capture, reference: Reference, comparison: Comparison, allowed: Allowance | None, *,
    seek_causes: bool, target: float, repair: bool, out: Path, rights: RightReferences | None,
) -> Candidate:  # fmt: skip
    """Judge a comparison and, if it is a mismatch and `seek_causes` is set, diagnose, repair and verify.

    If the reference departs from the spec, repairs are judged against a reference of `rights` that follows the spec. If
    `rights` is None, the candidate is patched to do what the given reference does.

    Raises:
        NotJudged: a backend failed; what it captured before stays on disk.
    """
    verdict, why = judge_comparison(comparison)
    misshapen = {(item.probe, item.site) for item in comparison.misshapen if not item.only_vocabulary}
    result = with_limits(
        before_diagnosis(session, capture, comparison, verdict, why, reference, allowed), comparison, reference
    )
    capture = capture.where(lambda entry: (entry.probe, entry.site) not in misshapen)
    if verdict is not Verdict.MISMATCH or not seek_causes:
        return result
    if EMBED_NORM in tensors_of_roles(session.plan) and not _centred_sites(allowed).isdisjoint(STREAM):
        return dataclasses.replace(result, not_tested=(*result.not_tested, NotTested(what="causes", why=NOT_CENTRED)))
    if any(finding.kind == SHARDING for finding in result.findings):
        gap = NotTested(what="other causes, and repair", why=UNREPAIRED)
        return dataclasses.replace(result, not_tested=(*result.not_tested, gap))
    try:
        changed = repeat_finding(session, capture, session.plan.dtype, out / "again")
        if changed is not None:
            result = _with_change(result, changed)
        if changed is not None and changed.knob == DETERMINISM:
            gaps = (
                NotTested(what="causes", why="two runs of the same tokens differ"),
                no_patch(DETERMINISM, UNREPEATABLE),
            )
            return dataclasses.replace(result, not_tested=(*result.not_tested, *gaps))
        if changed is not None:
            session.release()  # the model keeps state between runs; the diagnosis loads it afresh, without that state
        with centred(reference, _centred_sites(allowed), out / "centred") as moved:
            case = RepairCase(
                session=session, reference=moved, target=target, capture=capture, comparison=comparison, out=out
            )  # fmt: skip
            diagnosis = diagnosed(case, capture, comparison, "diagnosis-0", thorough=not repair)
    except Exception as error:
        return _broken_off(result, "diagnosis", error, session)
    result = _with_diagnosis(result, comparison, diagnosis, reference.session.plan)
    if rights is not None:
        result, reference = judged_for_the_rest(result, session, capture, reference, rights, allowed, run=repair)
    if not repair:
        untried = (*result.not_tested, NotTested(what="repair", why="switched off with --no-repair or --quick"))
        return dataclasses.replace(result, not_tested=untried)
    state = State(findings=[*result.findings], match_reference=rights is None)
    with ExitStack() as stack:
        try:
            moved = stack.enter_context(centred(reference, _centred_sites(allowed), out / "centred-repair"))
            case = case.against(moved)
        except Exception as error:
            return _broken_off(result, "repair", error, session)
        return _repaired(result, case, state)


def _centred_sites(allowed: Allowance | None) -> frozenset[str]:
    return frozenset() if allowed is None else allowed.centred


def _repaired(result: Candidate, case: RepairCase, state: State) -> Candidate:
    """Patch a diagnosed candidate, and prove on the reference the findings that no patch has confirmed."""
    session = case.session
    try:
        peel(case, state)
    except Exception as error:
        result = _broken_off(result, "repair", error, session)
    result = with_repair(result, state)
    try:
        return confirmed(_with_proof(result, session, case.capture, case.reference, state, case.out))
    except NotJudged as error:
        if error.code != DISK_BOUND:
            raise
        return confirmed(_broken_off(result, "proof on the reference", error, session))


def _with_change(result: Candidate, changed: Finding) -> Candidate:
    """Return the result with the finding that repeated runs of the candidate differ, which also becomes its reason."""
    return dataclasses.replace(result, findings=(*result.findings, changed), why=changed.message)


def _broken_off(result: Candidate, stage: str, error: Exception, session: Session) -> Candidate:
    """Return the result with a note that `stage` failed, and write the traceback to the candidate's log.

    The verdict on the outputs is kept: a failure of a later stage does not change it.
    """
    with session.log.open("a") as log:
        traceback.print_exception(error, file=log)
    why = f"broke off with {type(error).__name__}: {error} (see {session.log})"
    return dataclasses.replace(result, not_tested=(*result.not_tested, NotTested(what=stage, why=why)))


def _with_proof(
    result: Candidate, session: Session, capture: Capture, reference: Reference, state: State, out: Path
) -> Candidate:
    """Return the result with a proof: the reference is given the candidate's values and compared with the candidate again.

    This is done only if no patch brought the candidate to parity, or if the reference is the side that departs from the spec.
    """
    verified, patched = state.verified, result.patched.verdict if result.patched else None
    open_findings = left_to_prove(result)
    if reference.judge is None or not wants_proof(open_findings, patched):
        return result
    trial = Trial(
        reference=reference.judging, probes=reference.probes, dtype=reference.dtype, shipped=capture, before=result.logits,
        out=out / "proof", who=_who(reference), patched=verified.capture if verified else None,
        patched_knobs=state.took,
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
    """Return, in words, which program is given the candidate's constants in a proof: the reference or the judge."""
    return "the reference" if reference.judging is reference.session else f"the judge ({reference.judging.label})"


def _with_diagnosis(result: Candidate, comparison: Comparison, diagnosis: Diagnosis, plan: SidePlan) -> Candidate:
    return dataclasses.replace(
        result,
        sites=with_introduced(comparison.sites, diagnosis.introduced),
        findings=(*result.findings, *own_causes(diagnosis.findings, result.findings, plan)),
        not_tested=(*result.not_tested, *diagnosis.not_tested),
    )
