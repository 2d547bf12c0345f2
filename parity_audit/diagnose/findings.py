"""From fits on both sides to findings: one per knob and pair of values, with its layers and its evidence.

Whether two fits differ is decided in `agreement`. Layers whose own errors admit the difference as well as its
absence count with the rest, so that a constant that is wrong everywhere is not reported for the sharpest layer.
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
    Pair,
    alike,
    differs,
    has_places,
    is_number,
    pairs_of,
    same,
    tied,
    undecided,
)
from parity_audit.diagnose.confidence import FEW_SIGMAS, REMAINDER, TIED, confidence
from parity_audit.diagnose.evidence import EXPLAINED_BY as BY
from parity_audit.diagnose.evidence import FORMULA, POINTS, KnobFit, KnobSpec, spec_value, spoken_of
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.structure.projections import PROJECTIONS, bias_knob
from parity_audit.diagnose.structure.sample import AS_STORED, NOT_STORED
from parity_audit.diagnose.thresholds import CLEAN, CLEARLY_MORE
from parity_audit.formulas.alibi import standard_slopes
from parity_audit.formulas.attention import consecutive
from parity_audit.formulas.knobs import KNOBS, ROWS, meant, said_by

SIDES_WITH_SPEC = 0.25
"""Of the distance of both sides: a value that is so much nearer to the spec's than to the other side's is the spec's."""
SO_MANY_VALUES = 3
"""Numbers of one constant in different layers that are one matter. Two are often two: windowed layers and others have their own
settings."""
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
    "mlp.router_weights": ("moe.", *ROUTER),  # one module makes both: its weights follow its own logits
}  # fmt: skip
ONE_SITE = (*NORMS, *(f"weights.{item.role}" for item in PROJECTIONS), *(bias_knob(item.role) for item in PROJECTIONS))
"""Knobs of components that a block has several of: what was read off one of them says nothing of the others."""
RIGHT_AT = "right_at"
"""The evidence that a knob of several components of a block is right in others of the same block: their sites."""
MADE_BY = {"attn_out": "ln1_post.out", "mlp_out": "ln2_post.out"}
"""Where a block has a norm behind a sublayer, what the sublayer adds is that norm's output."""
FOLLOWS = {**MADE_BY, "mlp.router_weights": "mlp.router_logits"}
"""Sites whose errors are those of another: a router's weights follow its own logits, one module makes both."""


def with_followed(site: str) -> tuple[str, ...]:
    """A site, and the one of its block whose errors are its own (see `FOLLOWS`)."""
    name = local_name(site)
    return (site, site.removesuffix(name) + FOLLOWS[name]) if name in FOLLOWS else (site,)


def merge(
    candidate_fits: Sequence[KnobFit], reference_fits: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> list[Finding]:
    """Findings where both sides were fitted and differ; knobs in order of their names."""
    by_knob: dict[str, list[Pair]] = {}
    for pair in pairs_of(candidate_fits, reference_fits):
        by_knob.setdefault(pair.candidate.knob, []).append(pair)
    findings: list[Finding] = []
    for knob in sorted(by_knob):
        groups = _groups(by_knob[knob], knobs, together=_is_by_layer(knobs, knob))
        findings += [_finding(group, by_knob[knob], knobs) for group in groups]
    return findings


def _is_by_layer(knobs: Mapping[str, KnobSpec], knob: str) -> bool:
    """Whether what is wrong with a knob in several layers is one matter, whatever the values: a window's pattern over layers, and
    what a spec says layer by layer."""
    name = said_by(knob, knobs)
    return knob == "attention.window" or (name is not None and knobs[name].by_layer)


def _groups(pairs: Sequence[Pair], knobs: Mapping[str, KnobSpec], *, together: bool) -> list[list[Pair]]:
    """Differing pairs with the same two values; all of them `together` where a model has a value per layer, and where one side has
    (see `_one_per_layer`)."""
    wrong = [pair for pair in pairs if differs(pair)]
    if not wrong:
        return []
    if together:
        return [wrong]
    groups: list[list[Pair]] = []
    for pair in wrong:
        home = next((group for group in groups if _like(group[0], pair)), None)
        if home is None:
            groups.append([pair])
        else:
            home.append(pair)
    return [wrong] if _one_per_layer(groups, knobs) else groups


def _one_per_layer(groups: Sequence[Sequence[Pair]], knobs: Mapping[str, KnobSpec]) -> bool:
    """Whether these are the numbers of one constant that changes from layer to layer on one side, and on the other does not."""
    firsts = [group[0] for group in groups]
    layers = [layer for group in groups for layer in {pair.candidate.layer for pair in group}]
    candidate, reference = [pair.candidate for pair in firsts], [pair.reference for pair in firsts]
    return (
        len(groups) >= SO_MANY_VALUES
        and len(set(layers)) == len(layers)
        and len({fit.site for fit in candidate}) == 1
        and all(same(_spec(fit, knobs), _spec(candidate[0], knobs)) for fit in candidate)
        and any(
            all(is_number(fit.value) for fit in changing) and all(alike(fit, constant[0]) for fit in constant)
            for changing, constant in ((candidate, reference), (reference, candidate))
        )
    )


def _like(a: Pair, b: Pair) -> bool:
    return alike(a.candidate, b.candidate) and alike(a.reference, b.reference)


def _finding(group: Sequence[Pair], every: Sequence[Pair], knobs: Mapping[str, KnobSpec]) -> Finding:
    first = group[0]
    knob = first.candidate.knob
    own = {id(pair) for pair in group}
    expected = _spec(first.candidate, knobs)
    # A layer that should have another value is not assumed to have the same fault.
    alike_places = [pair for pair in every if id(pair) not in own and _spec(pair.candidate, knobs) == expected]
    candidate, reference = _told([p.candidate for p in group]), _told([p.reference for p in group])
    blunt = [pair for pair in alike_places if each_layer(candidate) is None and undecided(pair, group)]
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


def _layers(group: Iterable[Pair], every: Iterable[Pair]) -> tuple[int, ...] | None:
    """The group's layers, None when it covers every place that was fitted (and there is more than one block)."""
    own, all_places = ({pair.candidate.layer for pair in pairs} for pairs in (group, every))
    numbers = sorted(layer for layer in own if layer is not None)
    return None if not numbers or (own == all_places and len(numbers) > 1) else tuple(numbers)


def _full_site(fit: KnobFit) -> str:
    return _whole_name(fit.layer, fit.site)


def _whole_name(layer: int | None, site: str) -> str:
    return site if layer is None else f"blocks.{layer}.{site}"


def _told(fits: Sequence[KnobFit]) -> KnobValue:
    """The value of these layers, or one for each where they do not agree."""
    in_all = all(alike(fits[0], fit) for fit in fits[1:])
    return _pooled(fits) if in_all else by_layer({fit.layer: fit.value for fit in fits})


def _pooled(fits: Sequence[KnobFit]) -> KnobValue:
    """The mean of numeric values weighted by 1/stderr^2; the first of anything else."""
    numbers = [(float(fit.value), fit.stderr) for fit in fits if is_number(fit.value) and fit.stderr]  # type: ignore[arg-type]
    if len(numbers) != len(fits) or len({value for value, _ in numbers}) == 1:
        return fits[0].value
    weights = [1 / stderr**2 for _, stderr in numbers if stderr]
    return sum(value * weight for (value, _), weight in zip(numbers, weights, strict=True)) / sum(weights)


def _spec(fit: KnobFit, knobs: Mapping[str, KnobSpec]) -> KnobValue:
    """The spec's value in the form of the fit; the usual value where the spec is silent."""
    said = spec_value(knobs, fit.knob, fit.layer) if spoken_of(knobs, fit.knob) else DEFAULTS.get(fit.knob)
    return _in_form_of(meant(fit.knob, said), fit)


def _spec_of(fits: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]) -> KnobValue:
    """The spec's value in these layers, or one for each where it says so."""
    said = {fit.layer: _spec(fit, knobs) for fit in fits}
    first, *others = said.values()
    return first if all(same(one, first) for one in others) else by_layer(said)


def _in_form_of(value: KnobValue, fit: KnobFit) -> KnobValue:
    """A value as a fit of its knob says it: a multiple of the usual ALiBi slopes as the slopes themselves, the number of heads of
    keys and values as the one that each query head reads."""
    if fit.knob == "attention.alibi" and isinstance(value, (int, float)) and isinstance(fit.value, list):
        return [float(value) * slope for slope in standard_slopes(len(fit.value))]
    of_heads = fit.value["k"] if isinstance(fit.value, dict) and "k" in fit.value else fit.value
    if fit.knob != "n_kv_heads" or not isinstance(value, int) or not isinstance(of_heads, list):
        return value
    return list(consecutive(len(of_heads), value))


def departure(candidate: Sequence[KnobFit], reference: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]) -> str:
    """Which side's fitted values are not the spec's: "candidate", "reference", "both", or "unknown"."""
    if not spoken_of(knobs, candidate[0].knob) and candidate[0].knob not in DEFAULTS:
        return "unknown"

    def departs(fits: Sequence[KnobFit], others: Sequence[KnobFit]) -> bool:
        return not all(_agrees(fit, other, knobs) for fit, other in zip(fits, others, strict=True))

    sides = ["candidate"] * departs(candidate, reference) + ["reference"] * departs(reference, candidate)
    return {0: "unknown", 1: sides[0] if sides else "", 2: "both"}[len(sides)]


def _agrees(fit: KnobFit, other: KnobFit, knobs: Mapping[str, KnobSpec]) -> bool:
    """Whether a fit is the spec's value: within its error, or much nearer to it than the two sides to each other."""
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


def _marks(group: Sequence[Pair]) -> Iterator[str]:
    """What makes a finding less sure: see `diagnose.confidence`."""
    worst = max(group, key=lambda pair: pair.candidate.residual)
    # It leaves more than rounding, and clearly more than the reference's value leaves of its own: something else is wrong as well.
    if worst.candidate.residual > max(CLEAN, CLEARLY_MORE * worst.reference.residual):
        yield REMAINDER
    if min(pair.sigmas for pair in group) < 2 * SIGMAS:
        yield FEW_SIGMAS
    if _ties(group):
        yield TIED


def _ties(group: Sequence[Pair]) -> list[str]:
    fits = [fit for pair in group for fit in (pair.candidate, pair.reference)]
    return sorted({str(name) for fit in fits for name in fit.evidence.get("tied_with", [])})


def _evidence(group: Sequence[Pair], blunt: Sequence[Pair], right: Sequence[Pair]) -> dict[str, Any]:
    """The numbers a sceptic would ask for, of both sides, in each layer, and at which other sites of these layers they are right."""
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
    """Reports hold finite numbers only; what is infinite or unknown is null."""
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_by_formula(finding: Finding) -> bool:
    """Whether the candidate's values of a finding are those with which a formula, or a description of what the reference makes of
    the same inputs, leaves rounding."""
    facts = finding.evidence.get("candidate") or [finding.evidence]
    return all(fact.get(BY) == FORMULA for fact in facts)


def says_nothing(finding: Finding) -> bool:
    """Whether a finding tells two ways apart in which programs compute the same function: it explains a site, and is no fault."""
    row = KNOBS.get(finding.knob)
    return row is not None and row.same_function


def places_of(finding: Finding) -> set[str]:
    """The sites that a finding's values were read off, by their whole names."""
    facts = [fact for fact in finding.evidence.get("candidate", []) if "read_from" in fact]
    read = {_whole_name(fact["layer"], str(fact["read_from"])) for fact in facts}
    return read | set(finding.evidence.get("consistent_but_not_decisive", []))


def remainder_of(finding: Finding) -> float:
    """The share of a component that the candidate's value leaves, in the layer where that is most."""
    return max((float(fact.get("unexplained") or 0.0) for fact in finding.evidence.get("candidate", [])), default=0.0)


def is_nearly(finding: Finding) -> bool:
    """Whether a projection is said to have other weights that make nearly what it makes, and no more than that."""
    return finding.knob.startswith("weights.") and remainder_of(finding) > CLEAN


def stderr_of(finding: Finding, side: str) -> float:
    """The largest standard error of one side's value over its layers: an eps is known well only where activations are
    small."""
    return max((float(fact["stderr"]) for fact in finding.evidence.get(side, []) if fact.get("stderr")), default=0.0)


def shown(value: KnobValue) -> str:
    """A value for a sentence; six digits are for the eye, the finding keeps all."""
    if value is None:
        return "off"
    if each_layer(value) is not None:
        return in_layers(value, shown)
    return f"{value:.6g}" if is_number(value) else str(value)


def unexplained(sites: Mapping[str, Sequence[str]], findings: Sequence[Finding]) -> list[Finding]:
    """One finding per component that introduces error at sites that no finding explains, named by the first of them.

    `sites`: for each site, where its error may come from (`localise.origins`). What may come from a site that is listed itself, as
    in a long text that does not show that one, is not listed once more.
    """
    left: dict[str, list[str]] = {}
    listed = {site for item in findings if item.kind == "unexplained" for site in item.evidence.get("sites", [])}
    seen_before = {site for site, origins in sites.items() if not sites.keys().isdisjoint(set(origins) - {site})}
    for site in sorted(sites.keys() - listed - seen_before, key=site_order):
        if not any(_explains(cause, site, origin) for origin in sites[site] for cause in findings):
            left.setdefault(component_of(site), []).append(site)
    return [_unexplained(component, own) for component, own in left.items()]


def _explains(finding: Finding, site: str, origin: str) -> bool:
    """Whether a finding was read off `origin` itself, or is a cause of errors there, holds in the site's layer and, where it was
    read off one site of several alike, was read off this one."""
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
