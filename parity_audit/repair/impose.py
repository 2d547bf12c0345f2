"""Decide which findings can be imposed on the reference through its settings, and which are set aside instead.

A finding's value is imposed by the reference's own settings, in the finding's layers. Findings that settings cannot express (a
cause in some tokens only, a tensor, an error without a known cause) are set aside: the reference continues from the
candidate's own tensor at that site, and the site is not compared, so that every other error still shows. If a formula with the
finding's value reproduces that tensor up to rounding, the value counts as imposed in the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parity_audit.capture.session import Session, SidePlan
from parity_audit.core.report import Finding
from parity_audit.core.sites import BLOCK_ORDER, LOGITS, RETURNED, layer_of, local_name
from parity_audit.core.types import Edit, KnobValue
from parity_audit.diagnose.findings import is_by_formula, places_of
from parity_audit.diagnose.structure.projections import PROJECTIONS
from parity_audit.formulas.choices import FACTORS
from parity_audit.repair.choose import (
    NO_PATCH_KINDS,
    NORM_AT,
    ONE_SETTING,
    is_of_one_sublayer,
    nearest,
    on_norms,
    value_by_layer,
    whole_values,
)
from parity_audit.repair.layers import on_layers
from parity_audit.specs.settings import edits
from parity_audit.specs.view import dims, roles

SITE_OF_ROLE = {
    "embed": "embed", "unembed": "logits", **{role: site for site, role in NORM_AT.items()},
    **{item.role: item.output for item in reversed(PROJECTIONS)},
}  # fmt: skip
TAKEN_AT = {"attn_scores": ("z",), "pattern": ("z",), "rot_q": ("rot_q", "rot_k"), "rot_k": ("rot_q", "rot_k")}
"""The sites whose candidate tensors the reference continues from, if not the site itself: attention matrices of decoded
tokens are not captured, and a rotation changes both queries and keys."""
SUBLAYERS = ("attn_out", "mlp_out")
"""The sublayer outputs that every probe captures; used for long probes, which capture no other site of a sublayer."""


@dataclass(frozen=True, kw_only=True)
class Imposition:
    """How one finding is imposed on the reference: by `edits`, or not through settings, with the reason `why`."""

    finding: Finding
    edits: tuple[Edit, ...] = ()
    why: str = ""

    @property
    def in_formula(self) -> bool:
        """Whether the finding's value is imposed in the formulas instead of a setting.

        With this value the formulas compute the candidate's own tensors from its own inputs, up to rounding. To continue from
        those tensors is therefore the same as to continue from the formulas' result.
        """
        return bool(self.why) and is_by_formula(self.finding)


def impositions_of(findings: Sequence[Finding], reference: Session) -> list[Imposition]:
    """Return, for each finding, how it is imposed on the reference."""
    whole = [item for item in findings if item.kind not in NO_PATCH_KINDS and "extent" not in item.evidence]
    known = whole_values(whole, imposed_value, reference.plan)
    return [_way(finding, known, reference) for finding in findings]


def _way(finding: Finding, known: Mapping[str, KnobValue], reference: Session) -> Imposition:
    if finding.kind == "unexplained":
        return Imposition(finding=finding, why="no cause is known")
    if finding.kind in NO_PATCH_KINDS:
        return Imposition(finding=finding, why="it is in a tensor, and the reference keeps the checkpoint's")
    if "extent" in finding.evidence:
        return Imposition(
            finding=finding, why=f"it holds only {finding.evidence['extent']}, a setting of the reference everywhere"
        )
    if is_of_one_sublayer(finding):
        return Imposition(finding=finding, why=ONE_SETTING)
    plan, version = reference.plan, reference.description().release
    own = imposed_value(finding)
    value = own if value_by_layer(own, finding, plan) is None else known[finding.knob]
    found = edits(
        plan.spec, plan.backend_key, finding.knob, value, plan.config, version, known, finding.reference_value
    )
    if found is None:
        return Imposition(finding=finding, why="the reference has no setting that says this")
    kept = found if isinstance(value, list) else on_layers(found, finding.layers)
    if kept is None:
        return Imposition(finding=finding, why="the reference has one setting for all layers")
    return Imposition(finding=finding, edits=on_norms(kept, map(local_name, places_of(finding)), plan) or kept)


def imposed_value(finding: Finding) -> KnobValue:
    """Return the candidate's value as a setting, or the spec's own number if the fit agrees with it."""
    return _as_config(nearest(finding.candidate_value, finding.spec_value))


def _as_config(value: KnobValue) -> KnobValue:
    """Return a scaling in the form of a config: longrope that uses one list of factors at every length has it in both lists."""
    if not isinstance(value, dict) or FACTORS not in value:
        return value
    same = value[f"{str(value[FACTORS]).partition(' ')[0]}_factor"]
    return {**{key: part for key, part in value.items() if key != FACTORS}, "short_factor": same, "long_factor": same}


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """For one probe: the sites at which the reference takes over the candidate's tensors, and the sites not compared."""

    taken: frozenset[str]
    hidden: frozenset[str]


def set_aside(sites: Iterable[str], held: set[str]) -> SetAside:
    """Return which sites to take over and to hide for errors at `sites`, if the candidate captured the sites `held`.

    Sites between the error and the place where the candidate's tensor is taken over are not compared.
    """
    taken: set[str] = set()
    hidden: set[str] = set()
    for site in sites:
        own = _taken_at(site, held)
        taken |= own
        hidden |= {site, *own, *_between(site, own), *((RETURNED,) if site == LOGITS else ())}
    return SetAside(taken=frozenset(taken), hidden=frozenset(hidden))


def _taken_at(site: str, held: set[str]) -> set[str]:
    name = local_name(site)
    prefix = site.removesuffix(name)
    wanted = {prefix + other for other in TAKEN_AT.get(name, (name,))}
    if wanted <= held or layer_of(site) is None or name not in BLOCK_ORDER:
        return wanted & held
    after = (other for other in SUBLAYERS if BLOCK_ORDER.index(other) >= BLOCK_ORDER.index(name))
    return {prefix + other for other in list(after)[:1]} & held


def _between(site: str, taken: set[str]) -> Iterator[str]:
    name = local_name(site)
    if layer_of(site) is None or name not in BLOCK_ORDER or not taken:
        return
    last = max(BLOCK_ORDER.index(local_name(other)) for other in taken)
    yield from (site.removesuffix(name) + other for other in BLOCK_ORDER[BLOCK_ORDER.index(name) : last])


def places(finding: Finding, plan: SidePlan) -> set[str]:
    """Return the sites at which a finding's error enters."""
    if "tensor" in finding.evidence:
        return _places_of_tensors(finding, plan)
    named = {str(site) for site in finding.evidence.get("sites", [])}
    names = {local_name(finding.site)}
    names |= {str(fact["read_from"]) for fact in finding.evidence.get("candidate", []) if "read_from" in fact}
    layers = finding.layers or range(dims(plan.spec, plan.config)["n_layers"])
    return named or {f"blocks.{layer}.{name}" if name in BLOCK_ORDER else name for name in names for layer in layers}


def _places_of_tensors(finding: Finding, plan: SidePlan) -> set[str]:
    names = set(finding.evidence.get("tensors", [finding.site]))
    found: set[str] = set()
    # Tensors outside the blocks are in every layer's roles.
    for layer in range(dims(plan.spec, plan.config)["n_layers"]):
        own = {role for role, tap in roles(plan.spec, plan.config, layer).items() if tap.path in names}
        sites = {SITE_OF_ROLE.get(role.removesuffix(".bias"), "mlp_out") for role in own}
        found |= {f"blocks.{layer}.{site}" if site in BLOCK_ORDER else site for site in sites}
    return found
