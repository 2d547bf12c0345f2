"""The proof the other way round: give the reference the candidate's constants and see whether both now agree.

A candidate that no setting can mend still gets its diagnosis proved, and a reference that departs from the spec is
shown to be the side that is wrong. The reference is judged anew: it runs natively and in true float64 with the
candidate's constants, so the noise floor is that of the program the candidate is now said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Finding, Imposed, LogitsDelta, Proof, Verdict
from parity_audit.core.types import Edit, KnobValue, NotTested, Probe
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.findings import shown
from parity_audit.repair.choose import ENGINE_EDITS, NO_PATCH_KINDS, each_once, nearest, whole_value
from parity_audit.repair.layers import on_layers
from parity_audit.specs.view import edits

GOOD = (Verdict.EXACT, Verdict.PARITY)
WHAT = "proof of the diagnosis on the reference's side"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a proof needs: the reference to change, the probes, the candidate as shipped and, if patched, as patched."""

    reference: Session
    probes: tuple[Probe, ...]
    dtype: str
    shipped: Capture
    before: LogitsDelta | None
    out: Path
    who: str = "the reference"
    patched: Capture | None = None
    patched_knobs: frozenset[str] = frozenset()


def wants_proof(findings: Sequence[Finding], patched: Verdict | None) -> bool:
    """Whether a patch has not said it all: none took, or the reference is the side that departs."""
    causes = _causes(findings)
    return bool(causes) and (patched not in GOOD or any(item.departs_from_spec == "reference" for item in causes))


def prove(trial: Trial, findings: Sequence[Finding], unpatched: Sequence[str]) -> Proof | NotTested:
    """Impose every finding's candidate value on the reference and compare again, over all probes.

    Where the reference has no setting for some of them, the candidate's own patches stand in for those.
    `unpatched` are the knobs for which the candidate has no setting. The reference is as before in the end.
    """
    causes = _causes(findings)
    found = [(cause, _edits(cause, causes, trial.reference)) for cause in causes]
    missing = {cause.knob for cause, own in found if own is None}
    capture, on_candidate = trial.shipped, frozenset[str]()
    if missing and trial.patched is not None and missing <= trial.patched_knobs:
        capture, on_candidate = trial.patched, trial.patched_knobs
    elif missing:
        return NotTested(what=WHAT, why=f"{trial.who} cannot be given the candidate's {', '.join(sorted(missing))}")
    chosen = [(cause, own) for cause, own in found if own is not None and cause.knob not in on_candidate]
    if not chosen:
        return NotTested(what=WHAT, why="the candidate's patches leave nothing to impose on the reference")
    return _proof(trial, capture, chosen, unpatched)


def _causes(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that a value can be given for; a setting of the arithmetic has its own proof, by switching it off."""
    return [item for item in findings if item.kind not in NO_PATCH_KINDS and item.knob not in ENGINE_EDITS]


def imposed_value(finding: Finding) -> KnobValue:
    """The candidate's value; the spec's own number where the fit agrees with it."""
    return nearest(finding.candidate_value, finding.spec_value)


def _edits(finding: Finding, causes: Sequence[Finding], reference: Session) -> tuple[Edit, ...] | None:
    """What gives the reference the candidate's value in the finding's layers; None where it has no setting for that."""
    plan, version = reference.plan, reference.description().version
    known = {item.knob: whole_value(imposed_value(item), item, plan) for item in causes}
    value = known[finding.knob]
    found = edits(
        plan.spec, plan.backend_key, finding.knob, value, plan.config, version, known, finding.reference_value
    )
    return found if found is None or isinstance(value, list) else on_layers(found, finding.layers)


def _proof(
    trial: Trial, capture: Capture, chosen: Sequence[tuple[Finding, tuple[Edit, ...]]], unpatched: Sequence[str]
) -> Proof:
    reference = trial.reference
    try:
        reference.apply(each_once(edit for _, own in chosen for edit in own))
        native = take_capture(reference, trial.probes, trial.out / "imposed")
        judge = take_capture(reference, trial.probes, trial.out / "imposed-judge", precision=FLOAT64)
    finally:
        reference.apply(())
    comparison = compare(capture, native, judge, dtype=trial.dtype)
    verdict, why = judge_comparison(comparison)
    causes = [cause for cause, _ in chosen]
    return Proof(
        proven=verdict in GOOD, statement=statement(causes, verdict in GOOD, unpatched, trial.who), verdict=verdict, why=why,
        imposed=tuple(Imposed(knob=item.knob, value=imposed_value(item), layers=item.layers) for item in causes),
        before=trial.before, after=comparison.logits,
    )  # fmt: skip


def statement(causes: Sequence[Finding], proven: bool, unpatched: Sequence[str], who: str = "the reference") -> str:
    """The result in one or two sentences."""
    values = ", ".join(f"{item.knob}={_value(item)}{_where(item)}" for item in causes)
    open_knobs = [knob for knob in dict.fromkeys(item.knob for item in causes) if knob in unpatched]
    start = f"Not patchable: the candidate has no setting for {', '.join(open_knobs)}. " if open_knobs else ""
    if not proven:
        return f"{start}Not proven: with {values} {who} still does not compute what the candidate computes."
    wrong = all(item.departs_from_spec == "reference" for item in causes)
    end = " The candidate follows the spec, the reference departs from it." if wrong else ""
    return f"{start}Proved off-line: with {values} {who} computes what the candidate computes.{end}"


def _value(finding: Finding) -> str:
    value = imposed_value(finding)
    if isinstance(value, dict) and value.keys() == {"by_layer"}:
        return "/".join(shown(item) for item in value["by_layer"].values())
    spec = " (the spec's value)" if finding.departs_from_spec == "reference" else ""
    return shown(value) + spec


def _where(finding: Finding) -> str:
    if finding.layers is None:
        return ""
    return f" in layer{'s' if len(finding.layers) > 1 else ''} {', '.join(map(str, finding.layers))}"
