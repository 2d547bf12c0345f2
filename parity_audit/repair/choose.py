"""Choose, for each finding, the edits of the candidate's own settings that make it agree with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from parity_audit.capture.session import SidePlan
from parity_audit.checks.repeat import CHANGED, STATE
from parity_audit.core.by_layer import each_layer
from parity_audit.core.report import Finding
from parity_audit.core.sites import NORM_ROLES, local_name
from parity_audit.core.types import Edit, KnobValue, NotTested
from parity_audit.diagnose.agreement import SIGMAS, is_number
from parity_audit.diagnose.extent import is_of_decoding
from parity_audit.diagnose.findings import DEFAULTS, RIGHT_AT, places_of, stderr_of
from parity_audit.diagnose.narrow import DTYPE
from parity_audit.diagnose.returned import NO_PATCH
from parity_audit.repair.layers import RELATIVE, in_every_layer, on_layers
from parity_audit.specs.schema import ResolvedKnob
from parity_audit.specs.settings import edit_note, edits, live_path
from parity_audit.specs.view import dims, knob_values, roles

NO_SETTING = {
    **NO_PATCH, STATE: CHANGED,
    DTYPE: "load the port in the dtype that was asked for, or ask for the port's own with --dtype to see what else is wrong",
}  # fmt: skip
NO_PATCH_KINDS = ("unexplained", "weights", "hook")
A_PATCH = "a patch for "
REWRITTEN = (
    "The right value was in force and did not repair it: the port applies the constant in another place as well, and this "
    "value makes up for that."
)
SAME_VALUE = 1e-3
BY_LAYER = ("attention.window",)
"""Knobs that differ from layer to layer by design, so that one layer's value must not be used for another."""
OF_BOTH_SUBLAYERS = "residual.scale"
"""The knob that scales what attention and the MLP add to the residual stream; programs set it with one number for both."""
OTHER_SUBLAYER = {"attn_out": "mlp_out", "mlp_out": "attn_out", "resid_mid": "resid_post", "resid_post": "resid_mid"}
"""The corresponding site of the other sublayer: its output, or the residual stream after it."""
ONE_SETTING = "one setting says it of attention and the MLP, and it is right in one of them"
NORM_AT = {
    **NORM_ROLES, "q_norm.out": "norm.q", "k_norm.out": "norm.k", "q_latent_norm.out": "norm.q_latent",
    "kv_latent_norm.out": "norm.kv_latent",
}  # fmt: skip
ENGINE_EDITS = {"numerics.tf32": (Edit(op="load", value={"tf32": False}),)}
"""Edits that every backend of this project understands, whatever the architecture."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One knob, the value that it should take in one backend, and the edits that set it."""

    knob: str
    backend: str
    value: KnobValue
    edits: tuple[Edit, ...]
    note: str = ""


def propose(
    findings: Sequence[Finding],
    plan: SidePlan,
    release: str,
    known: Sequence[Finding],
    *,
    rewritten: Mapping[str, KnobValue] | None = None,
    match_reference: bool = False,
) -> tuple[list[Proposal], list[NotTested]]:
    """Return one proposal per finding, and the findings for which this backend has no setting, with the reason.

    `known` are all findings so far: rotary knobs share one table, which is rewritten with all their values at once.
    If only the reference departs from the spec, nothing is edited unless `match_reference` is set. `rewritten` are the values
    for settings whose right value was in force and did not repair the finding (see `rewrite`).
    """
    rewritten = rewritten or {}
    if not match_reference:
        findings, known = (
            [item for item in some if item.departs_from_spec != "reference"] for some in (findings, known)
        )
    causes = [other for other in known if other.kind not in NO_PATCH_KINDS]
    targets = whole_values(causes, partial(target_value, match_reference=match_reference), plan)
    proposals: list[Proposal] = []
    gaps: list[NotTested] = []
    for finding in findings:
        if finding.kind in NO_PATCH_KINDS:
            gaps.append(no_patch(finding.knob, f"{finding.kind}: no setting repairs it"))
            continue
        if is_of_one_sublayer(finding):
            gaps.append(no_patch(finding.knob, ONE_SETTING))
            continue
        if is_of_decoding(finding):
            gaps.append(no_patch(finding.knob, "a whole run is right: cached decoding has no setting of its own"))
            continue
        target = whole_value(rewritten.get(finding.knob, target_value(finding, match_reference)), finding, plan)
        found = _found(finding, plan, release, target, targets)
        if finding.knob in rewritten and not isinstance(found, str):
            found = on_layers(found, finding.layers) or found  # layers outside the finding keep the right value
        if isinstance(found, str):
            gaps.append(no_patch(finding.knob, found))
            continue
        note = REWRITTEN if finding.knob in rewritten else edit_note(plan.spec, plan.backend_key, finding.knob, release)
        proposals.append(
            Proposal(knob=finding.knob, backend=str(plan.ref), value=target, edits=found, note=note)
        )  # fmt: skip
    return proposals, gaps


def is_of_one_sublayer(finding: Finding) -> bool:
    """Whether the residual scale is wrong at one sublayer and right at the other, so that one setting cannot repair it."""
    right, wrong = finding.evidence.get(RIGHT_AT, ()), places_of(finding)
    of_one = bool(wrong) and all(OTHER_SUBLAYER.get(local_name(site)) in right for site in wrong)
    return finding.knob == OF_BOTH_SUBLAYERS and of_one


def no_patch(knob: str, why: str) -> NotTested:
    """Return the entry that says that no patch is offered for a knob, and why."""
    return NotTested(what=f"{A_PATCH}{knob}", why=why)


def _found(
    finding: Finding, plan: SidePlan, release: str, target: KnobValue, targets: Mapping[str, KnobValue]
) -> tuple[Edit, ...] | str:
    """Return the edits that set a finding's knob to `target`, or the reason why there are none."""
    found = ENGINE_EDITS.get(finding.knob) or edits(
        plan.spec, plan.backend_key, finding.knob, target, plan.config, release, targets, finding.candidate_value
    )
    if found is not None and any(edit.op in RELATIVE for edit in found):
        read_from = {str(fact.get("read_from")) for fact in finding.evidence.get("candidate", [])}
        found = on_layers(on_norms(found, read_from, plan), finding.layers)
    if found is None:
        return NO_SETTING.get(finding.knob, f"{plan.ref.name} has no setting for it")
    if plan.ref.target is not None:
        found = tuple(edit for edit in found if edit.op != "load")
    return found or "it is a load setting, and the port loads itself"


def on_norms(edits: tuple[Edit, ...], sites: Iterable[str], plan: SidePlan) -> tuple[Edit, ...]:
    """Drop the edits of norms whose output is not one of these sites ("ln2.out"), because those norms are right.

    An edit that adds to a weight would spoil a right norm, and one of several norms may have an eps of its own. If none of the
    sites is a norm's output, all edits are returned.
    """
    named = {NORM_AT[site] for site in sites if site in NORM_AT}
    if not named:
        return edits
    layers = (None, *range(dims(plan.spec, plan.config)["n_layers"]))
    others = {
        in_every_layer(live_path(tap.path)).rpartition(".")[0]
        for role in NORM_AT.values()
        for layer in layers
        if role not in named and (tap := roles(plan.spec, plan.config, layer).get(role))
    }
    return tuple(edit for edit in edits if not any(in_every_layer(edit.path).startswith(f"{norm}.") for norm in others))


def target_value(finding: Finding, match_reference: bool = False) -> KnobValue:
    """Return the value that the candidate should take: the reference's, or the spec's number if the fit agrees with it.

    A patch then says 16 and not 15.99997. If both sides depart from the spec, it is the spec's value, unless `match_reference`
    is set. If only the candidate departs and a value is not a number, it is the spec's value too.
    """
    fitted, spec = finding.reference_value, finding.spec_value
    if finding.departs_from_spec == "both" and not match_reference:
        return spec
    if is_number(fitted) and is_number(spec):
        return nearest(fitted, spec, SIGMAS * stderr_of(finding, "reference"))
    return spec if finding.departs_from_spec == "candidate" else fitted


def nearest(fitted: KnobValue, spec: KnobValue, error: float = 0.0) -> KnobValue:
    """Return the spec's number if the fitted one agrees with it within `SAME_VALUE` (relative) or `error`, else the fitted one."""
    if not is_number(fitted) or not is_number(spec):
        return fitted
    return spec if abs(fitted - spec) <= max(SAME_VALUE * abs(spec), error) else fitted  # type: ignore[operator,arg-type]


def whole_value(value: KnobValue, finding: Finding, plan: SidePlan) -> KnobValue:
    """Return a value found layer by layer as a list with one value per layer; layers without a finding get the spec's value.

    Any other value is returned unchanged.
    """
    by_layer = value_by_layer(value, finding, plan)
    return value if by_layer is None else _in_each_layer(by_layer, finding.knob, plan)


def whole_values(
    findings: Sequence[Finding], value_of: Callable[[Finding], KnobValue], plan: SidePlan
) -> dict[str, KnobValue]:
    """Return one value per knob: if it is set per layer, a list of each finding's value in its layers; else the last finding's."""
    whole: dict[str, KnobValue] = {}
    told: dict[str, dict[int, KnobValue]] = {}
    for finding in findings:
        value = value_of(finding)
        by_layer = value_by_layer(value, finding, plan)
        if by_layer is None:
            whole[finding.knob] = value
        else:
            told.setdefault(finding.knob, {}).update(by_layer)
    return {**whole, **{knob: _in_each_layer(by_layer, knob, plan) for knob, by_layer in told.items()}}


def value_by_layer(value: KnobValue, finding: Finding, plan: SidePlan) -> dict[int, KnobValue] | None:
    """Return a finding's value by layer, if it was found per layer or the setting has one value per layer; else None."""
    found = each_layer(value)
    if found is not None:
        return found
    if finding.layers is not None and (finding.knob in BY_LAYER or _is_said_by_layer(finding.knob, plan)):
        return dict.fromkeys(finding.layers, value)
    return None


def _is_said_by_layer(knob: str, plan: SidePlan) -> bool:
    """Whether a knob is set per layer: the spec gives a value per layer, or a `rope.` knob's right value differs between layers.

    Rotary tables are made of the values of all layers at once.
    """
    known = knob_values(plan.spec, plan.config).get(knob)
    if known is None:
        return False
    if known.by_layer or not knob.startswith("rope."):
        return known.by_layer
    values = [known.at(layer) for layer in range(dims(plan.spec, plan.config)["n_layers"])]
    return any(value != values[0] for value in values)


def _in_each_layer(by_layer: Mapping[int, KnobValue], knob: str, plan: SidePlan) -> list[KnobValue]:
    known = knob_values(plan.spec, plan.config).get(knob, ResolvedKnob(value=DEFAULTS.get(knob)))
    layers = range(dims(plan.spec, plan.config)["n_layers"])
    return [by_layer[layer] if layer in by_layer else known.at(layer) for layer in layers]


def all_edits(proposals: Sequence[Proposal]) -> tuple[Edit, ...]:
    """Return the edits of several proposals in order, each once."""
    return each_once(edit for proposal in proposals for edit in proposal.edits)


def each_once(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return the edits in order, each once; they are compared one by one, because a value may be a list, which has no hash."""
    out: list[Edit] = []
    for edit in edits:
        if edit not in out:
            out.append(edit)
    return tuple(out)
