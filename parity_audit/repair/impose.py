"""What of a diagnosis the reference can be given as the finding says it, and what is set aside instead.

A value is imposed by the reference's own settings, in the finding's layers. What they cannot say (a cause in some tokens
only, a tensor, an error without a known cause) is set aside: the reference goes on from the candidate's own tensor at the
site in question, and that site is not compared. Whatever else is wrong then still shows. Where a formula with the value makes that
tensor up to rounding, the value counts as imposed: in the formula.
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
"""Where the reference goes on from the candidate's tensor, if not at the site itself: attention matrices of decoded
tokens are not captured, and a rotation turns both queries and keys."""
SUBLAYERS = ("attn_out", "mlp_out")
"""What every probe captures of a block: where a long one holds no other site."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one finding is imposed on the reference: by these edits, or not at all, and then why."""

    finding: Finding
    edits: tuple[Edit, ...] = ()
    why: str = ""

    @property
    def in_formula(self) -> bool:
        """Whether the finding's value is imposed in the formulas instead: with it they make the candidate's own tensors of its own
        inputs, up to rounding, so that to go on from those tensors is to go on from what the formulas make."""
        return bool(self.why) and is_by_formula(self.finding)


def ways_of(findings: Sequence[Finding], reference: Session) -> list[Way]:
    """One way per finding."""
    whole = [item for item in findings if item.kind not in NO_PATCH_KINDS and "extent" not in item.evidence]
    known = whole_values(whole, imposed_value, reference.plan)
    return [_way(finding, known, reference) for finding in findings]


def _way(finding: Finding, known: Mapping[str, KnobValue], reference: Session) -> Way:
    if finding.kind == "unexplained":
        return Way(finding=finding, why="no cause is known")
    if finding.kind in NO_PATCH_KINDS:
        return Way(finding=finding, why="it is in a tensor, and the reference keeps the checkpoint's")
    if "extent" in finding.evidence:
        return Way(
            finding=finding, why=f"it holds only {finding.evidence['extent']}, a setting of the reference everywhere"
        )
    if is_of_one_sublayer(finding):
        return Way(finding=finding, why=ONE_SETTING)
    plan, version = reference.plan, reference.description().release
    own = imposed_value(finding)
    value = own if value_by_layer(own, finding, plan) is None else known[finding.knob]
    found = edits(
        plan.spec, plan.backend_key, finding.knob, value, plan.config, version, known, finding.reference_value
    )
    if found is None:
        return Way(finding=finding, why="the reference has no setting that says this")
    kept = found if isinstance(value, list) else on_layers(found, finding.layers)
    if kept is None:
        return Way(finding=finding, why="the reference has one setting for all layers")
    return Way(finding=finding, edits=on_norms(kept, map(local_name, places_of(finding)), plan) or kept)


def imposed_value(finding: Finding) -> KnobValue:
    """The candidate's value as a setting; the spec's own number where the fit agrees with it."""
    return _as_config(nearest(finding.candidate_value, finding.spec_value))


def _as_config(value: KnobValue) -> KnobValue:
    """A scaling as a config has it: longrope with one kind of factors at every length has these in both of its lists."""
    if not isinstance(value, dict) or FACTORS not in value:
        return value
    same = value[f"{str(value[FACTORS]).partition(' ')[0]}_factor"]
    return {**{key: part for key, part in value.items() if key != FACTORS}, "short_factor": same, "long_factor": same}


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """Of one probe: the sites where the candidate's own tensors are taken over, and those that are not compared."""

    taken: frozenset[str]
    hidden: frozenset[str]


def set_aside(sites: Iterable[str], held: set[str]) -> SetAside:
    """What to take over for errors at these sites, where the candidate holds `held` for a probe.

    Not compared is what stands between the site of the error and where the candidate's tensor is taken over.
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
    """The sites where a finding's error enters."""
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
    for layer in range(
        dims(plan.spec, plan.config)["n_layers"]
    ):  # tensors outside the blocks are in every layer's roles
        own = {role for role, tap in roles(plan.spec, plan.config, layer).items() if tap.path in names}
        sites = {SITE_OF_ROLE.get(role.removesuffix(".bias"), "mlp_out") for role in own}
        found |= {f"blocks.{layer}.{site}" if site in BLOCK_ORDER else site for site in sites}
    return found
