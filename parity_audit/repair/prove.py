"""Prove a diagnosis on the reference: set the candidate's constants in the reference and test whether both now agree.

This proves the diagnosis of a candidate that no setting can repair, and it shows that the reference is the wrong side if it
departs from the spec. A new noise floor is measured: the reference runs natively and in float64 with the candidate's
constants, so the floor belongs to the function that the diagnosis says the candidate computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.deltas import Comparison, compare
from parity_audit.compare.source import Without
from parity_audit.compare.verdict import judge_comparison, judge_rest
from parity_audit.core.by_layer import each_layer
from parity_audit.core.errors import BackendFailed
from parity_audit.core.report import Finding, Imposed, LogitsDelta, Proof, Verdict
from parity_audit.core.types import NotTested, Probe
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.diagnose.extent import is_of_decoding
from parity_audit.diagnose.findings import shown
from parity_audit.diagnose.narrow import SETTINGS
from parity_audit.repair.choose import NO_PATCH_KINDS, each_once, nearest
from parity_audit.repair.impose import Imposition, SetAside, imposed_value, impositions_of, places, set_aside

GOOD = (Verdict.EXACT, Verdict.PARITY)
WHAT = "proof of the diagnosis on the reference's side"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The inputs of a proof: the reference to change, the probes, and the candidate's captures as shipped and as patched."""

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
    """Whether a proof is needed besides the patch: no patch led to parity, or the reference departs from the spec."""
    causes = _causes(findings)
    return bool(causes) and (patched not in GOOD or any(item.departs_from_spec == "reference" for item in causes))


def prove(trial: Trial, findings: Sequence[Finding], unpatched: Sequence[str]) -> Proof | NotTested:
    """Set the candidate's values in the reference as the findings state them, and compare again over all probes.

    If the reference has no setting for some values, the patched candidate is used, provided its patches repair all of those;
    otherwise they are set aside (see `impose`), and the proof says which and why. `unpatched` are the knobs for which the
    candidate has no setting. The reference's edits are undone at the end.
    """
    ways = impositions_of([item for item in findings if item.knob not in SETTINGS], trial.reference)
    patched = set_right(ways, trial.patched_knobs)
    capture, missing = trial.shipped, [way for way in ways if way.why]
    if missing and trial.patched is not None and all(way in patched for way in missing):
        capture, ways = trial.patched, [way for way in ways if way not in patched]
    if not ways:
        return NotTested(what=WHAT, why="the candidate's patches leave nothing to impose on the reference")
    try:
        return _proof(trial, capture, ways, unpatched)
    except BackendFailed:
        return _proof(trial, capture, [accepted(way, trial.reference) for way in ways], unpatched)


def set_right(ways: Sequence[Imposition], patched_knobs: Collection[str]) -> list[Imposition]:
    """Return the ways of findings that the candidate's patches repair; no patch repairs findings of decoded tokens only."""
    return [way for way in ways if way.finding.knob in patched_knobs and not is_of_decoding(way.finding)]


def accepted(way: Imposition, reference: Session) -> Imposition:
    """Return the way itself, or one with the reason why not, if the reference's own code fails with the value."""
    try:
        reference.apply(way.edits)
    except BackendFailed as error:
        return Imposition(finding=way.finding, why=f"the reference fails with it: {error.message}")
    finally:
        reference.restore()
    return way


def _causes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with a value that can be imposed; a setting of the arithmetic is proved by switching it off."""
    return [item for item in findings if item.kind not in NO_PATCH_KINDS and item.knob not in SETTINGS]


def _proof(trial: Trial, capture: Capture, ways: Sequence[Imposition], unpatched: Sequence[str]) -> Proof:
    imposed, aside = [way for way in ways if not way.why], [way for way in ways if way.why]
    taken = {probe.name: _taken(probe, capture, aside, trial.reference.plan) for probe in trial.probes}
    comparison = _compared(trial, capture, imposed, taken)
    verdict, why = judge_comparison(comparison)
    if comparison.logits is None:  # the logits were set aside, so the other sites decide
        verdict, why = judge_rest(comparison)
    by_formula, left = [way for way in aside if way.in_formula], [way for way in aside if not way.in_formula]
    good = verdict in GOOD
    return Proof(
        proven=good and bool(imposed or by_formula), verdict=verdict, why=why, before=trial.before, after=comparison.logits,
        statement=statement(
            [way.finding for way in imposed], good, unpatched, trial.who, aside=left, why=why,
            by_formula=[way.finding for way in by_formula],
        ),
        imposed=tuple(_imposed(way) for way in (*imposed, *by_formula)),
        not_imposed=tuple(NotTested(what=f"{way.finding.knob}{_where(way.finding)}", why=way.why) for way in left),
    )  # fmt: skip


def _imposed(way: Imposition) -> Imposed:
    finding = way.finding
    by = "formula" if way.why else "setting"
    return Imposed(knob=finding.knob, value=imposed_value(finding), layers=finding.layers, by=by)


def _taken(probe: Probe, capture: Capture, aside: Sequence[Imposition], plan: SidePlan) -> SetAside:
    """Return what is set aside on one probe; findings of decoded tokens only count on probes with decode steps."""
    own = (way.finding for way in aside if probe.decode_from is not None or not is_of_decoding(way.finding))
    return set_aside({site for finding in own for site in places(finding, plan)}, capture.sites(probe.name))


def _compared(
    trial: Trial, capture: Capture, imposed: Sequence[Imposition], taken: Mapping[str, SetAside]
) -> Comparison:
    """Compare the candidate with the reference under these edits; at the taken sites it continues from the candidate's tensors."""
    reference, forced_by = trial.reference, capture if any(own.taken for own in taken.values()) else None

    def run(name: str, precision: str) -> Capture:
        return take_capture(
            reference, trial.probes, trial.out / name, precision=precision, forced_by=forced_by,
            force=lambda probe, site: site in taken[probe].taken,
        )  # fmt: skip

    try:
        reference.apply(each_once(edit for way in imposed for edit in way.edits))
        native, judge = run("imposed", NATIVE), run("imposed-judge", FLOAT64)
    finally:
        reference.restore()
    hidden = {probe: own.hidden for probe, own in taken.items()}
    return compare(Without(capture, hidden), native, judge, dtype=trial.dtype)


def statement(
    causes: Sequence[Finding], proven: bool, unpatched: Sequence[str], who: str = "the reference",
    *, aside: Sequence[Imposition] = (), why: str = "", by_formula: Sequence[Finding] = (),
) -> str:  # fmt: skip
    """Return the result in a few sentences: what was imposed, what was set aside, and whether both sides then agree."""
    every = [*causes, *by_formula]
    open_knobs = [knob for knob in dict.fromkeys(item.knob for item in every) if knob in unpatched]
    start = f"Not patchable: the candidate has no setting for {', '.join(open_knobs)}. " if open_knobs else ""
    left = "; ".join(f"{way.finding.knob}{_where(way.finding)} ({way.why})" for way in aside)
    end = f" Not imposed: {left}; there the candidate's own values were taken over." if aside else ""
    if by_formula:
        given = f"{who[:1].upper()}{who[1:]} has no setting for {_values(by_formula)}"
        end = f" {given}: the formulas with it make the candidate's own values, up to rounding, and the run went on from those.{end}"
    if not proven:
        given, more = f"with {_values(every)}" if every else "beside what is not imposed", f": {why}" if why else ""
        return f"{start}Not proven: {given} {who} still does not compute what the candidate computes{more}.{end}"
    if not every:
        return f"Beside what is not imposed {who} computes what the candidate computes: nothing else is wrong.{end}"
    wrong = all(item.departs_from_spec == "reference" for item in every)
    side = " The candidate follows the spec, the reference departs from it." if wrong else ""
    return f"{start}Proved off-line: with {_values(every)} {who} computes what the candidate computes.{side}{end}"


def _values(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{item.knob}={_value(item)}{_where(item)}" for item in findings)


def _value(finding: Finding) -> str:
    value = nearest(finding.candidate_value, finding.spec_value)
    by_layer = each_layer(value)
    if by_layer is not None:
        return "/".join(map(shown, by_layer.values()))
    spec = " (the spec's value)" if finding.departs_from_spec == "reference" else ""
    return shown(value) + spec


def _where(finding: Finding) -> str:
    if finding.layers is None:
        return ""
    return f" in layer{'s' if len(finding.layers) > 1 else ''} {', '.join(map(str, finding.layers))}"
