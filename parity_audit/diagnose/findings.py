"""Turn the fits of both sides into findings: one per knob and pair of values, with its layers and its evidence.

`agreement` decides whether two fits differ. A layer whose error bars include both no difference and the difference of other layers
is counted with those layers, so that a constant that is wrong everywhere is not reported only for the layers where it is measured
most precisely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from parity_audit.core.by_layer import by_layer, each_layer, in_layers, values_of
from parity_audit.core.report import Finding
from parity_audit.core.sites import layer_of, local_name, site_order
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.agreement import (
    MATERIAL,
    MATERIAL_OF,
    SIGMAS,
    FitPair,
    consistent_with,
    differs,
    has_places,
    is_number,
    pairs_of,
    same,
    same_value,
    tied,
)
from parity_audit.diagnose.confidence import FEW_SIGMAS, REMAINDER, TIED, confidence
from parity_audit.diagnose.evidence import EXPLAINED_BY as BY
from parity_audit.diagnose.evidence import FORMULA, POINTS, KnobFit, KnobSpec, spec_has_knob, spec_value
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.structure.projections import PROJECTIONS, bias_knob
from parity_audit.diagnose.structure.sample import AS_STORED, NOT_STORED
from parity_audit.diagnose.thresholds import CLEAN, CLEARLY_MORE
from parity_audit.formulas.alibi import standard_slopes
from parity_audit.formulas.attention import consecutive
from parity_audit.formulas.knobs import KNOBS, ROWS, meant, name_in_spec

SIDES_WITH_SPEC = 0.25
"""A fitted number is the spec's if its distance to the spec is at most this share of the distance between both sides."""
SO_MANY_VALUES = 3
"""Number of different values of one constant, in different layers, from which they are one finding. Two values are often two
findings, since windowed layers and the other layers have settings of their own."""
MASKS = ("attention.window", "attention.mask")
DEFAULTS: dict[str, KnobValue] = {
    **{row.name: row.default for row in ROWS if row.judged},
    **{f"weights.{item.role}": AS_STORED for item in PROJECTIONS},
    **{f"weights.{item.role}.scale": 1.0 for item in PROJECTIONS},
    **{bias_knob(item.role): AS_STORED for item in PROJECTIONS},
}
ROUTER = ("weights.moe.router", "moe.router_bias")
NORMS, CORE = ("norm.",), ("attention.", "n_kv_heads", "cache.")
EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    "embed": ("embed.",), "pos_embed": ("pos_embed.",), "norm": NORMS, "final_norm": NORMS,
    "ln2.out": ("residual.parallel",),
    "attn_out": (*NORMS, "residual."), "mlp_out": (*NORMS, "residual.", "mlp.", "moe.weighted", "moe.weights_read", "moe.dropped"),
    "residual": ("residual.", "pos_embed.", "norm.order", "laurel.scale", "altup.active", "per_layer.streams"),
    "altup": ("altup.", *NORMS), "laurel": ("laurel.", *NORMS),
    "per_layer": ("per_layer.", "altup.active", "altup.output_scale", *NORMS),
    "attn_proj": ("weights.attn.o", "attention.o_bias"),
    "qkv": ("norm.order", "weights.attn.gate", "weights.delta.",
            *(name for part in "qkv" for name in (f"weights.attn.{part}", f"attention.{part}_bias"))),
    "delta": ("delta.",), "z_gated": ("attention.gate", "delta.norm_eps", "delta.gate"),
    "qk_norm": ("qk_norm.",), "rope": ("rope.", "qk_norm.", "n_kv_heads"), "scores": CORE, "pattern": CORE, "z": CORE,
    "mlp": ("mlp.", "weights.mlp", "residual.parallel", "norm.order"), "logits": ("logits.",), "mlp.router_logits": ROUTER,
    "router_norm": (*NORMS, "moe.router_input_scale"),
    "mlp.router_weights": ("moe.", *ROUTER),  # one module computes the router's logits and its weights
}  # fmt: skip
ONE_SITE = (*NORMS, *(f"weights.{item.role}" for item in PROJECTIONS), *(bias_knob(item.role) for item in PROJECTIONS))
"""Knobs of components that a block has several of: a value fitted at one of them says nothing about the others."""
RIGHT_AT = "right_at"
"""Entry in a finding's evidence: the sites of the same block at which the same knob was fitted and is right."""
MADE_BY = {"attn_out": "ln1_post.out", "mlp_out": "ln2_post.out"}
"""The post-norm whose output a sublayer adds to the residual, in blocks that have one: both sites have the same values."""
FOLLOWS = {**MADE_BY, "mlp.router_weights": "mlp.router_logits"}
"""Sites whose errors are those of another site: a router's weights follow its own logits, because one module computes both."""


def with_followed(site: str) -> tuple[str, ...]:
    """The site, and the site of the same block whose errors it repeats, if there is one (see `FOLLOWS`)."""
    name = local_name(site)
    return (site, site.removesuffix(name) + FOLLOWS[name]) if name in FOLLOWS else (site,)


def merge(
    candidate_fits: Sequence[KnobFit], reference_fits: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> list[Finding]:
    """Findings for the knobs whose fits on both sides differ, in the order of the knobs' names."""
    by_knob: dict[str, list[FitPair]] = {}
    for pair in pairs_of(candidate_fits, reference_fits):
        by_knob.setdefault(pair.candidate.knob, []).append(pair)
    findings: list[Finding] = []
    for knob in sorted(by_knob):
        groups = _groups(by_knob[knob], knobs, together=_is_by_layer(knobs, knob))
        findings += [_finding(group, by_knob[knob], knobs) for group in groups]
    return findings


def _is_by_layer(knobs: Mapping[str, KnobSpec], knob: str) -> bool:
    """Whether differences of a knob in several layers are one finding, whatever the values. This holds for a window, whose sizes
    form a pattern over the layers, and for knobs that the spec gives layer by layer."""
    name = name_in_spec(knob, knobs)
    return knob == "attention.window" or (name is not None and knobs[name].by_layer)


def _groups(pairs: Sequence[FitPair], knobs: Mapping[str, KnobSpec], *, together: bool) -> list[list[FitPair]]:
    """The pairs that differ, grouped by their two values. They form one group if `together` is true, which it is for knobs with a
    value per layer, or if one side's value changes from layer to layer (see `_one_per_layer`)."""
    wrong = [pair for pair in pairs if differs(pair)]
    if not wrong:
        return []
    if together:
        return [wrong]
    groups: list[list[FitPair]] = []
    for pair in wrong:
        home = next((group for group in groups if _like(group[0], pair)), None)
        if home is None:
            groups.append([pair])
        else:
            home.append(pair)
    return [wrong] if _one_per_layer(groups, knobs) else groups


def _one_per_layer(groups: Sequence[Sequence[FitPair]], knobs: Mapping[str, KnobSpec]) -> bool:
    """Whether one side has a different number in each group's layers and the other side has one value: at least `SO_MANY_VALUES`
    groups, each layer in one group only, all fits of one site, and the same spec value for all."""
    firsts = [group[0] for group in groups]
    layers = [layer for group in groups for layer in {pair.candidate.layer for pair in group}]
    candidate, reference = [pair.candidate for pair in firsts], [pair.reference for pair in firsts]
    return (
        len(groups) >= SO_MANY_VALUES
        and len(set(layers)) == len(layers)
        and len({fit.site for fit in candidate}) == 1
        and all(same(_spec(fit, knobs), _spec(candidate[0], knobs)) for fit in candidate)
        and any(
            all(is_number(fit.value) for fit in changing) and all(same_value(fit, constant[0]) for fit in constant)
            for changing, constant in ((candidate, reference), (reference, candidate))
        )
    )


def _like(a: FitPair, b: FitPair) -> bool:
    return same_value(a.candidate, b.candidate) and same_value(a.reference, b.reference)


def _finding(group: Sequence[FitPair], every: Sequence[FitPair], knobs: Mapping[str, KnobSpec]) -> Finding:
    first = group[0]
    knob = first.candidate.knob
    own = {id(pair) for pair in group}
    expected = _spec(first.candidate, knobs)
    # A layer for which the spec has another value is not assumed to have the same fault.
    alike_places = [pair for pair in every if id(pair) not in own and _spec(pair.candidate, knobs) == expected]
    candidate, reference = _told([p.candidate for p in group]), _told([p.reference for p in group])
    blunt = [pair for pair in alike_places if each_layer(candidate) is None and consistent_with(pair, group)]
    right = [pair for pair in alike_places if pair not in blunt and not differs(pair)]
    candidate, reference = _in_form_of(candidate, first.reference), _in_form_of(reference, first.candidate)
    fits = [pair.candidate for pair in group], [pair.reference for pair in group]
    return Finding(
        knob=knob, kind=_kind(knob, candidate, reference), layers=_layers([*group, *blunt], every),
        site=_full_site(first.candidate), reference_value=_finite(reference), candidate_value=_finite(candidate),
        spec_value=_finite(_spec_of([p.candidate for p in group], knobs)), evidence=_evidence(group, blunt, right),
        confidence=confidence(_marks(group)),
        departs_from_spec=departure(*fits, knobs),
        message=f"{knob} is {shown(candidate)} in the candidate and {shown(reference)} in the reference",
    )  # fmt: skip


def _layers(group: Iterable[FitPair], every: Iterable[FitPair]) -> tuple[int, ...] | None:
    """The group's layers; None if they are all layers that were fitted (and more than one), or if the knob is outside the blocks."""
    own, all_places = ({pair.candidate.layer for pair in pairs} for pairs in (group, every))
    numbers = sorted(layer for layer in own if layer is not None)
    return None if not numbers or (own == all_places and len(numbers) > 1) else tuple(numbers)


def _full_site(fit: KnobFit) -> str:
    return _whole_name(fit.layer, fit.site)


def _whole_name(layer: int | None, site: str) -> str:
    return site if layer is None else f"blocks.{layer}.{site}"


def _told(fits: Sequence[KnobFit]) -> KnobValue:
    """The value of these fits, pooled if they agree, else one value for each layer."""
    in_all = all(same_value(fits[0], fit) for fit in fits[1:])
    return _pooled(fits) if in_all else by_layer({fit.layer: fit.value for fit in fits})


def _pooled(fits: Sequence[KnobFit]) -> KnobValue:
    """The mean of the values, weighted by 1/stderr^2; the first value if one is no number, has no error, or if all are equal."""
    numbers = [(float(fit.value), fit.stderr) for fit in fits if is_number(fit.value) and fit.stderr]  # type: ignore[arg-type]
    if len(numbers) != len(fits) or len({value for value, _ in numbers}) == 1:
        return fits[0].value
    weights = [1 / stderr**2 for _, stderr in numbers if stderr]
    return sum(value * weight for (value, _), weight in zip(numbers, weights, strict=True)) / sum(weights)


def _spec(fit: KnobFit, knobs: Mapping[str, KnobSpec]) -> KnobValue:
    """The spec's value in the form of the fit; the default value if the spec does not have the knob."""
    said = spec_value(knobs, fit.knob, fit.layer) if spec_has_knob(knobs, fit.knob) else DEFAULTS.get(fit.knob)
    return _in_form_of(meant(fit.knob, said), fit)


def _spec_of(fits: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]) -> KnobValue:
    """The spec's value in these layers, or one value for each layer where they differ."""
    said = {fit.layer: _spec(fit, knobs) for fit in fits}
    first, *others = said.values()
    return first if all(same(one, first) for one in others) else by_layer(said)


def _in_form_of(value: KnobValue, fit: KnobFit) -> KnobValue:
    """Convert a value to the form that a fit of its knob has. A multiple of the standard ALiBi slopes becomes the list of slopes,
    and a number of key-value heads becomes the list of the key-value heads that the query heads read."""
    if fit.knob == "attention.alibi" and isinstance(value, (int, float)) and isinstance(fit.value, list):
        return [float(value) * slope for slope in standard_slopes(len(fit.value))]
    of_heads = fit.value["k"] if isinstance(fit.value, dict) and "k" in fit.value else fit.value
    if fit.knob != "n_kv_heads" or not isinstance(value, int) or not isinstance(of_heads, list):
        return value
    return list(consecutive(len(of_heads), value))


def departure(candidate: Sequence[KnobFit], reference: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]) -> str:
    """The side whose fitted values are not the spec's: "candidate", "reference" or "both"; "unknown" if neither or if there is no
    spec."""
    if not spec_has_knob(knobs, candidate[0].knob) and candidate[0].knob not in DEFAULTS:
        return "unknown"

    def departs(fits: Sequence[KnobFit], others: Sequence[KnobFit]) -> bool:
        return not all(_agrees(fit, other, knobs) for fit, other in zip(fits, others, strict=True))

    sides = ["candidate"] * departs(candidate, reference) + ["reference"] * departs(reference, candidate)
    return {0: "unknown", 1: sides[0] if sides else "", 2: "both"}[len(sides)]


def _agrees(fit: KnobFit, other: KnobFit, knobs: Mapping[str, KnobSpec]) -> bool:
    """Whether a fit agrees with the spec: within its error, or much nearer to the spec than the two sides are to each other."""
    spec = _spec(fit, knobs)
    if isinstance(spec, (int, float)) and isinstance(fit.value, (int, float)):
        apart = abs(fit.value - other.value) if isinstance(other.value, (int, float)) else 0.0
        material = MATERIAL_OF.get(fit.knob, MATERIAL) * abs(spec)
        return abs(fit.value - spec) <= max(material, SIGMAS * (fit.stderr or 0.0), SIDES_WITH_SPEC * apart)
    return same(fit.value, spec) or tied(fit, spec)


def _kind(knob: str, candidate: KnobValue, reference: KnobValue) -> str:
    if knob in MASKS:
        return "mask"
    if candidate == NOT_STORED:
        return "weights"
    if knob == "rope.offset":
        return "settings"
    number = all(value is None or is_number(value) for value in (*values_of(candidate), *values_of(reference)))
    return "constant" if number else "variant"


def _marks(group: Sequence[FitPair]) -> Iterator[str]:
    """The properties of a finding that make it less certain; see `diagnose.confidence`."""
    worst = max(group, key=lambda pair: pair.candidate.residual)
    # The candidate's value leaves more than rounding, and clearly more than the reference's does: something else is wrong as well.
    if worst.candidate.residual > max(CLEAN, CLEARLY_MORE * worst.reference.residual):
        yield REMAINDER
    if min(pair.sigmas for pair in group) < 2 * SIGMAS:
        yield FEW_SIGMAS
    if _ties(group):
        yield TIED


def _ties(group: Sequence[FitPair]) -> list[str]:
    fits = [fit for pair in group for fit in (pair.candidate, pair.reference)]
    return sorted({str(name) for fit in fits for name in fit.evidence.get("tied_with", [])})


def _evidence(group: Sequence[FitPair], blunt: Sequence[FitPair], right: Sequence[FitPair]) -> dict[str, Any]:
    """The evidence of a finding: the fits of both sides in each layer, and the other sites of these layers that are right."""
    least, ties = min(pair.sigmas for pair in group), _ties(group)
    out: dict[str, Any] = {
        "sigmas": None if math.isinf(least) else least,
        "candidate": _with_one_picture([_facts(pair.candidate) for pair in group]),
        "reference": _with_one_picture([_facts(pair.reference) for pair in group]),
    }
    if blunt:
        out["consistent_but_not_decisive"] = [_full_site(pair.candidate) for pair in blunt]
    layers = {pair.candidate.layer for pair in group}
    beside = {pair.candidate.site for pair in right if pair.candidate.layer in layers and has_places(pair.candidate)}
    if beside:
        out[RIGHT_AT] = sorted(beside)
    return out | ({"tied_with": ties} if ties else {})


def _with_one_picture(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *rest = entries
    return [first, *({key: value for key, value in one.items() if key != POINTS} for one in rest)]


def _facts(fit: KnobFit) -> dict[str, Any]:
    facts = {"layer": fit.layer, "value": fit.value, "stderr": fit.stderr, "unexplained": fit.residual, "n": fit.n,
             "read_from": fit.site}  # fmt: skip
    return {key: _finite(value) for key, value in (facts | fit.evidence).items()}


def _finite(value: Any) -> Any:
    """The value with infinite and undefined numbers replaced by None, since reports hold finite numbers only."""
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_by_formula(finding: Finding) -> bool:
    """Whether a formula, or a description of the component's output, leaves only rounding with the candidate's values."""
    facts = finding.evidence.get("candidate") or [finding.evidence]
    return all(fact.get(BY) == FORMULA for fact in facts)


def is_equivalent_implementation(finding: Finding) -> bool:
    """Whether a finding distinguishes two implementations that compute the same function: it explains a site, but is no fault."""
    row = KNOBS.get(finding.knob)
    return row is not None and row.same_function


def places_of(finding: Finding) -> set[str]:
    """The full names of the sites at which a finding's values were fitted."""
    facts = [fact for fact in finding.evidence.get("candidate", []) if "read_from" in fact]
    read = {_whole_name(fact["layer"], str(fact["read_from"])) for fact in facts}
    return read | set(finding.evidence.get("consistent_but_not_decisive", []))


def remainder_of(finding: Finding) -> float:
    """The share of a component that the candidate's value leaves unexplained, in the layer where that share is largest."""
    return max((float(fact.get("unexplained") or 0.0) for fact in finding.evidence.get("candidate", [])), default=0.0)


def is_approximate_projection(finding: Finding) -> bool:
    """Whether a finding says that other weights nearly reproduce a projection, with more than rounding left."""
    return finding.knob.startswith("weights.") and remainder_of(finding) > CLEAN


def stderr_of(finding: Finding, side: str) -> float:
    """The largest standard error of one side's value over its layers: an eps is known well only where activations are small."""
    return max((float(fact["stderr"]) for fact in finding.evidence.get(side, []) if fact.get("stderr")), default=0.0)


def shown(value: KnobValue) -> str:
    """The value as text for a sentence, with six digits; the finding keeps all digits."""
    if value is None:
        return "off"
    if each_layer(value) is not None:
        return in_layers(value, shown)
    return f"{value:.6g}" if is_number(value) else str(value)


def unexplained(sites: Mapping[str, Sequence[str]], findings: Sequence[Finding]) -> list[Finding]:
    """One finding per component that introduces error at sites that no finding explains, located at the first of these sites.

    `sites`: for each site, the sites that its error may come from (`localise.origins`). A site whose error may come from another
    site of `sites` is not reported a second time; that happens in a long text that does not show the other site.
    """
    left: dict[str, list[str]] = {}
    listed = {site for item in findings if item.kind == "unexplained" for site in item.evidence.get("sites", [])}
    seen_before = {site for site, origins in sites.items() if not sites.keys().isdisjoint(set(origins) - {site})}
    for site in sorted(sites.keys() - listed - seen_before, key=site_order):
        if not any(_explains(cause, site, origin) for origin in sites[site] for cause in findings):
            left.setdefault(component_of(site), []).append(site)
    return [_unexplained(component, own) for component, own in left.items()]


def _explains(finding: Finding, site: str, origin: str) -> bool:
    """Whether a finding explains the error that `site` shows and that comes from `origin`. It does if it was fitted at `origin`
    (or at the site that `origin` follows), or if its knob is a cause of errors of that component and it holds in the site's
    layer. A knob of components that a block has several of must have been fitted at this one."""
    component, layer, row = component_of(origin), layer_of(site), KNOBS.get(finding.knob)
    places = places_of(finding)
    if places & set(with_followed(origin)):
        return True
    of_component = row is not None and row.component == component
    causes = (*EXPLAINED_BY.get(component, ()), *EXPLAINED_BY.get(local_name(origin), ()))
    if not of_component and not finding.knob.startswith(causes):
        return False
    if not (finding.layers is None or layer is None or layer in finding.layers):
        return False
    read = {local_name(place) for place in places}
    return (
        not read or not finding.knob.startswith(ONE_SITE) or bool({local_name(origin), FOLLOWS.get(component)} & read)
    )


def _unexplained(component: str, sites: Sequence[str]) -> Finding:
    numbers = sorted({layer for site in sites if (layer := layer_of(site)) is not None})
    return Finding(
        knob=component, kind="unexplained", layers=tuple(numbers) or None, site=sites[0],
        reference_value=None, candidate_value=None, confidence=0.5, departs_from_spec="unknown",
        evidence={"component": component, "sites": list(sites)},
        message=f"{component} introduces error that no constant known here explains",
    )  # fmt: skip
