"""Check the reference against its architecture's spec: fit constants on its activations and read its live settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import Capture
from parity_audit.checks.preflight import config_warnings
from parity_audit.checks.reference_agrees import invariance_notes
from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Finding
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.agreement import SIGMAS, is_number, same
from parity_audit.diagnose.decoding import run_whole
from parity_audit.diagnose.evidence import KnobFit, evidence_by_layer, spec_value
from parity_audit.diagnose.findings import shown
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.sides import ByLayer
from parity_audit.diagnose.fitting import ATTENTION
from parity_audit.diagnose.identities import hook_warnings, stored_factors
from parity_audit.diagnose.numerics import reduced_products
from parity_audit.diagnose.thresholds import ALIKE
from parity_audit.specs.resolve import ResolvedModel, read_config
from parity_audit.specs.unread import unread_keys
from parity_audit.specs.view import effective_values, knob_values, spec_values
from parity_audit.specs.wrapped import config_for

CHECKED = ("attention.scale", "attention.softcap")
COARSE = "the reference multiplies in TF32: the noise floor of this run is TF32's, not float32's"


def reference_notes(
    session: Session, capture: Capture, judge: Capture | None, out: Path, departing: Sequence[Finding]
) -> list[str]:
    """Return one line per departure of the reference from its spec, from itself, or from the meaning of its hooks.

    `departing`: the findings of departures from the spec that its activations show.
    """
    plan, about = session.plan, session.description()
    live = effective_values(plan.spec, plan.backend_key, about, plan.config)
    notes = config_warnings(spec_values(plan.spec, plan.config), live, "reference")
    notes += [COARSE] if reduced_products(about, plan.device, plan.dtype) else []
    notes += [finding.message for finding in departing]
    notes += _unread(plan)
    notes += hook_warnings(capture, "reference", plan.dtype, stored_factors(plan))
    if judge is None:
        return notes
    try:
        return [*notes, *invariance_notes(session, capture, judge, out)]
    except NotJudged as error:  # the captured reference is still used, even if the self-check fails
        session.discard()
        return [*notes, f"the self-check broke off: {error.message}"]


def _unread(plan: SidePlan) -> list[str]:
    """Return one line per key of config.json whose effect no knob of the spec describes."""
    written = config_for(read_config(Path(plan.checkpoint.path)), plan.spec.architecture)
    model = ResolvedModel(repo_id=plan.checkpoint.repo_id, spec=plan.spec, config=written)
    return [
        f"config.json has {key}={value!r:.60}, which the spec of {plan.spec.architecture} does not read and which "
        f"{'changes' if matters else 'may change'} what the model computes: it is compared, and no finding can name it"
        for key, value, matters in unread_keys(model)
    ]


def departures(capture: Capture, plan: SidePlan) -> list[Finding]:
    """Return a finding per constant of attention whose fitted value in the reference's first block is not the spec's.

    Attention is fitted because implementations of one library differ from each other there: a kernel without soft-cap
    drops it without an error. The fit sees what was computed, not what was configured. A constant without an effect on these
    probes cannot be fitted and is not reported.
    """
    layers = run_whole(evidence_by_layer("reference", [capture], plan))
    first: ByLayer = {0: layers[0]}
    fits = causes(first, first, ATTENTION).reference
    knobs = knob_values(plan.spec, plan.config)
    checked = {fit.knob: (fit, spec_value(knobs, fit.knob, 0)) for fit in fits if fit.knob in CHECKED}
    return [_finding(fit, spec) for fit, spec in checked.values() if _departs(fit, spec)]


def _departs(fit: KnobFit, spec: KnobValue) -> bool:
    if is_number(fit.value) and is_number(spec):
        slack = max(ALIKE * abs(float(spec)), SIGMAS * (fit.stderr or 0.0))  # type: ignore[arg-type]
        return abs(float(fit.value) - float(spec)) > slack  # type: ignore[arg-type]
    return not same(fit.value, spec)


def _finding(fit: KnobFit, spec: KnobValue) -> Finding:
    values = f"{fit.knob} is {shown(fit.value)} in its activations, not {shown(spec)}"
    return Finding(
        knob=fit.knob, kind="constant", layers=None, site=f"blocks.0.{fit.site}", reference_value=fit.value,
        candidate_value=None, spec_value=spec, departs_from_spec="reference",
        message=f"the reference itself departs from the spec: {values}",
    )  # fmt: skip
