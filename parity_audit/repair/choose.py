"""From findings to the edits that bring the candidate to the reference, in the candidate's own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parity_audit.capture.session import SidePlan
from parity_audit.core.report import Finding
from parity_audit.core.types import Edit, KnobValue, NotTested
from parity_audit.repair.layers import RELATIVE, on_layers
from parity_audit.specs.view import edit_note, edits

NO_PATCH_KINDS = ("unexplained", "weights")
SAME_VALUE = 1e-3
ENGINE_EDITS = {"numerics.tf32": (Edit(op="load", value={"tf32": False}),)}
"""Settings that every backend of this project understands, whatever the architecture."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One knob, the value it shall take in one backend, and the edits that set it."""

    knob: str
    backend: str
    value: KnobValue
    edits: tuple[Edit, ...]
    note: str = ""


def propose(
    findings: Sequence[Finding], plan: SidePlan, version: str, known: Sequence[Finding]
) -> tuple[list[Proposal], list[NotTested]]:
    """Edits per finding, and the findings that this backend has no setting for, with the reason.

    `known` are all findings so far: rotary ones share one table, which is rewritten with every value at once.
    """
    proposals: list[Proposal] = []
    gaps: list[NotTested] = []
    for finding in findings:
        if finding.kind in NO_PATCH_KINDS:
            gaps.append(NotTested(what=f"a patch for {finding.knob}", why=f"{finding.kind}: no setting repairs it"))
            continue
        target = target_value(finding)
        targets = {other.knob: target_value(other) for other in known if other.kind not in NO_PATCH_KINDS}
        found = _found(finding, plan, version, target, targets)
        if isinstance(found, str):
            gaps.append(NotTested(what=f"a patch for {finding.knob}", why=found))
            continue
        note = edit_note(plan.spec, plan.backend_key, finding.knob, version)
        proposals.append(
            Proposal(knob=finding.knob, backend=str(plan.ref), value=target, edits=found, note=note)
        )  # fmt: skip
    return proposals, gaps


def _found(
    finding: Finding, plan: SidePlan, version: str, target: KnobValue, targets: Mapping[str, KnobValue]
) -> tuple[Edit, ...] | str:
    """The edits, or why there are none."""
    found = ENGINE_EDITS.get(finding.knob) or edits(
        plan.spec, plan.backend_key, finding.knob, target, plan.config, version, targets, finding.candidate_value
    )
    if found is not None and any(edit.op in RELATIVE for edit in found):
        found = on_layers(found, finding.layers)
    if found is None:
        return f"{plan.ref.name} has no setting for it"
    if plan.ref.target is not None:
        found = tuple(edit for edit in found if edit.op != "load")
    return found or "it is a load setting, and the port loads itself"


def target_value(finding: Finding) -> KnobValue:
    """The reference's value; the spec's own number where the fit agrees with it, so that a patch says 16 and not 15.99997."""
    fitted, spec = finding.reference_value, finding.spec_value
    if isinstance(fitted, (int, float)) and isinstance(spec, (int, float)) and not isinstance(fitted, bool):
        return spec if abs(fitted - spec) <= SAME_VALUE * abs(spec) else fitted
    return spec if finding.departs_from_spec == "candidate" else fitted


def all_edits(proposals: Sequence[Proposal]) -> tuple[Edit, ...]:
    """The edits of several proposals, each once, in order."""
    out: list[Edit] = []
    for proposal in proposals:
        out += [edit for edit in proposal.edits if edit not in out]
    return tuple(out)
