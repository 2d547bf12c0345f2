"""Replace a reference that departs from the spec, so that no candidate is patched to repeat the reference's error.

The replacement ("right reference") is the first of these that is possible:

1. the definition in transformers, if it is the judge of the given reference;
2. the same program with the load settings that the spec names for the wrong constants;
3. the same program without the settings that the user gave it;
4. the loaded reference with its live values edited.

The replacement runs every probe natively and in float64, as the given reference did, so candidates are judged and patched
against it in the same way. Each replacement is made once for all candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parity_audit.audit.reference import FLOAT64_BACKENDS, JUDGES, Reference, take_reference
from parity_audit.capture.session import Session, SidePlan, merged
from parity_audit.capture.store import Capture
from parity_audit.checks.selfcheck import CHECKED, departures
from parity_audit.compare.processing import Allowance
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Candidate, Finding, RightReference, Verdict
from parity_audit.core.types import BackendRef, Edit, NotTested
from parity_audit.repair.choose import NO_PATCH_KINDS, each_once
from parity_audit.repair.layers import RELATIVE, on_layers
from parity_audit.repair.render import render
from parity_audit.specs.settings import edits
from parity_audit.specs.view import knob_values

GOOD = (Verdict.EXACT, Verdict.PARITY)
WRONG_SIDES = ("reference", "both")
WHAT = "a right reference"
NO_SETTING = (
    "no setting of the reference is known that gives it the spec's value; compare with `-r hf`, or with another release"
)
NOT_RUN = "not run: switched off with --no-repair or --quick"
SHOWN = "its own activations show the spec's values"
AGREES = "a candidate with the spec's values agrees with it up to rounding"
EDITED = "the reference with the spec's values"
UNCONFIRMED = "nothing has confirmed it: no candidate, patched or not, agrees with it up to rounding"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """How to make a reference follow the spec: another BACKEND string, or edits of the loaded model."""

    ref: BackendRef
    edits: tuple[Edit, ...] = ()


def wrong(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings about a constant in which the reference departs from the spec."""
    return [item for item in findings if item.kind not in NO_PATCH_KINDS and item.departs_from_spec in WRONG_SIDES]


def remedy(plan: SidePlan, release: str, causes: Sequence[Finding], *, judged_by_definition: bool) -> Remedy | None:
    """Return the replacement of a reference whose constants in `causes` are wrong; None if none is known.

    See the module docstring for the order in which replacements are tried.
    """
    if judged_by_definition:
        return Remedy(ref=BackendRef(name=JUDGES))
    found = [_spec_s_value(cause, plan, release) for cause in causes]
    settings = dict(plan.ref.settings)
    for edit in (edit for own in found for edit in own if edit.op == "load"):
        settings = merged(settings, edit.value)
    by_loading = all(any(edit.op == "load" for edit in own) for own in found)
    if by_loading and settings != plan.ref.settings:
        return Remedy(ref=dataclasses.replace(plan.ref, settings=settings))
    if plan.ref.settings and plan.ref.target is None:
        return Remedy(ref=dataclasses.replace(plan.ref, settings={}))
    live = each_once(edit for own in found for edit in own)
    return Remedy(ref=plan.ref, edits=live) if all(found) else None


def _spec_s_value(cause: Finding, plan: SidePlan, release: str) -> tuple[Edit, ...]:
    """Return the edits that give the reference the spec's value of this constant; empty if it has no setting for it."""
    known = knob_values(plan.spec, plan.config).get(cause.knob)
    value = cause.spec_value if known is None else known.value
    found = edits(plan.spec, plan.backend_key, cause.knob, value, plan.config, release, {}, cause.reference_value) or ()
    relative = any(edit.op in RELATIVE for edit in found)
    return on_layers(found, cause.layers) or () if relative else found


def compare_with(given: Reference, causes: Sequence[Finding]) -> list[str]:
    """Return a line for the self-check that names the BACKEND to compare with instead of a reference that departs.

    Return nothing if the reference does not depart, or if the replacement is not another BACKEND string.
    """
    plan, release = given.session.plan, given.session.description().release
    found = remedy(plan, release, causes, judged_by_definition=given.definition is not None) if causes else None
    return [] if found is None or found.edits else [f"compare with `-r {found.ref}`, which should follow the spec"]


@dataclass
class RightReferences:
    """Make and keep replacements of the given reference; each is run once and shared by the candidates that need it.

    `make` opens a session for a BACKEND string. `keep` says whether more than one model may be in memory. `taken` holds the
    replacements that were run.
    """

    make: Callable[[BackendRef], Session]
    folder: Path
    keep: bool
    taken: dict[str, Reference] = field(default_factory=dict)

    def instead_of(
        self, given: Reference, causes: Sequence[Finding], *, run: bool
    ) -> tuple[RightReference, Reference | None] | NotTested:
        """Return the proposed replacement of `given`, and the replacement itself if it was run.

        It is run only if `run` is set; without a run, or if the run failed, the second value is None and the proposal says
        why. If no replacement is known, a `NotTested` entry is returned instead.
        """
        plan, release = given.session.plan, given.session.description().release
        found = remedy(plan, release, causes, judged_by_definition=given.definition is not None)
        knobs = tuple(dict.fromkeys(cause.knob for cause in causes))
        if found is None:
            return NotTested(what=WHAT, why=f"{NO_SETTING} ({', '.join(knobs)})")
        code = render(found.edits, plan.backend_key, given.session.description().text_paths) if found.edits else ""
        text = "" if found.edits else str(found.ref)
        proposal = RightReference(knobs=knobs, backend=text, code=code, verified=False, why=NOT_RUN)
        if not run:
            return proposal, None
        try:
            right = self._reference(given, found)
        except NotJudged as error:
            return dataclasses.replace(proposal, why=f"it could not be run: {error.message}"), None
        shown = set(knobs) <= set(CHECKED) and not {
            fit.knob for fit in departures(right.capture, right.session.plan)
        } & set(knobs)
        return dataclasses.replace(proposal, verified=shown, why=SHOWN if shown else UNCONFIRMED), right

    def _reference(self, given: Reference, found: Remedy) -> Reference:
        if given.definition is not None:
            return dataclasses.replace(given, session=given.judging, capture=given.definition, definition=None)
        key = dumps([str(found.ref), found.edits])
        if key not in self.taken:
            self.taken[key] = self._take(given, found)
        return self.taken[key]

    def _take(self, given: Reference, found: Remedy) -> Reference:
        if not self.keep:
            given.release()
        session = self.make(found.ref)
        session.apply(found.edits)
        judging = session if session.plan.backend_key in FLOAT64_BACKENDS else given.judging
        right = take_reference(session, judging, given.probes, folder=self.folder, keep=self.keep)
        if not self.keep:
            right.release()
        return right

    @property
    def held(self) -> list[Capture]:
        """Return the captures of every replacement that was run."""
        return [capture for right in self.taken.values() for capture in (right.capture, *right.held)]

    def release(self) -> None:
        """Release the models of all replacements from memory."""
        for right in self.taken.values():
            right.release()


def judged_for_the_rest(
    result: Candidate,
    session: Session,
    capture: Capture,
    given: Reference,
    rights: RightReferences,
    allowed: Allowance | None,
    *,
    run: bool,
) -> tuple[Candidate, Reference]:
    """Return the candidate's result compared with a right reference, and the reference that patches are judged against.

    If the findings do not show that the reference is wrong, or if no replacement could be run, that is the given reference.
    `session` is the candidate's; its model is released first if only one model may be in memory.
    """
    causes = wrong(result.findings)
    if not causes or given.judge is None:
        return result, given
    if not rights.keep:
        session.release()
    found = rights.instead_of(given, causes, run=run)
    if isinstance(found, NotTested):
        return dataclasses.replace(result, not_tested=(*result.not_tested, found)), given
    proposal, right = found
    if right is None:
        return dataclasses.replace(result, right_reference=proposal), given
    comparison = right.compared(capture, allowed)
    verdict, _ = judge_comparison(comparison)
    proposal = dataclasses.replace(proposal, verdict=verdict, logits=comparison.logits)
    return dataclasses.replace(result, right_reference=proposal), right


def left_to_prove(result: Candidate) -> tuple[Finding, ...]:
    """Return the findings that still have to be proved against the reference that patches were judged against.

    If the given reference was replaced, findings in which only that reference departs from the spec are left out: the
    replacement has the right value already.
    """
    right = result.right_reference
    if right is None or right.verdict is None:
        return result.findings
    return tuple(item for item in result.findings if item.departs_from_spec != "reference")


def confirmed(result: Candidate) -> Candidate:
    """Return the result after patches were tried, with the replacement of the reference confirmed if it is.

    The replacement is confirmed if the candidate, as shipped or patched, agrees with it up to rounding.
    """
    right, patched = result.right_reference, result.patched
    if right is None or right.verdict is None:
        return result
    if right.verdict in GOOD or (patched is not None and patched.verdict in GOOD):
        right = dataclasses.replace(right, verified=True, why=f"{right.why}; {AGREES}" if right.verified else AGREES)
    label = right.backend or EDITED
    patched = None if patched is None else dataclasses.replace(patched, against=label)
    return dataclasses.replace(result, right_reference=right, patched=patched)
