"""Read the constants of both sides off their activations, and say where they differ.

One file per knob family, each with its maths in the docstring and one function
`fit(evidence) -> list[KnobFit | NotTested]`. Only families whose component introduces error are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from parity_audit.compare.threads import one_thread
from parity_audit.core.report import Finding
from parity_audit.core.sites import local_name
from parity_audit.core.types import NotTested
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.evidence import Evidence, KnobFit, KnobSpec, Outcome, where
from parity_audit.diagnose.findings import MADE_BY, merge, places_of
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.settings import Setting
from parity_audit.diagnose.identify import embedding
from parity_audit.diagnose.identify.linear import family as linear
from parity_audit.diagnose.identify.linear.sample import NOT_STORED
from parity_audit.diagnose.localise import component_of

BEHIND_NORMS = ("weights.attn.q", "weights.attn.k", "weights.attn.v", "weights.mlp.gate", "weights.mlp.up", "residual.")
READ_BY_MLP = ("weights.mlp.gate", "weights.mlp.up")
ATTENTION = ("scores", "pattern", "z")
"""The components of attention behind queries and keys, which share their knobs."""
Identifier = Callable[[Evidence], "list[Outcome]"]
ByLayer = Mapping["int | None", Evidence]

Families = Mapping[str, "tuple[Identifier, frozenset[str]]"]

FAMILIES: Families = {
    "embedding": (embedding.fit, frozenset({"embed"})),
    "linear": (linear.fit, frozenset({"qkv", "attn_proj", "mlp", "attn_out", "mlp_out", "mlp.router_logits"})),
}


def identify(
    evidence_candidate_by_layer: ByLayer,
    evidence_reference_by_layer: ByLayer,
    suspects: Collection[str] | None,
    families: Families = FAMILIES,
) -> tuple[list[Finding], list[NotTested]]:
    """Findings and what could not be read.

    `suspects` are the components that introduce error (embed, norm, qkv, rope, scores, pattern, z, mlp,
    final_norm, logits, ...); None fits everything. Where both sides say the same, nothing is found: a suspect
    component without a finding is listed as not explained.
    """
    chosen = {name: family for name, (family, components) in families.items()
              if suspects is None or components & set(suspects)}  # fmt: skip
    candidate, gaps = fit_side(evidence_candidate_by_layer.values(), chosen.values())
    reference, more = fit_side(evidence_reference_by_layer.values(), chosen.values())
    knobs = next(iter(evidence_candidate_by_layer.values())).knobs if evidence_candidate_by_layer else {}
    findings, unmerged = _merged(candidate, reference, knobs)
    return without_echoes(findings), [*gaps, *more, *unmerged]


def causes_at(
    candidate: ByLayer,
    reference: ByLayer,
    wrong: Collection[str],
    families: Families = FAMILIES,
    known: Sequence[Setting] = (),
) -> tuple[list[Finding], list[NotTested]]:
    """Findings for the sites where error is introduced: the knob whose formula leaves rounding (see `fit.causes`, also for `known`),
    and what the families read off the components that have a site which no formula explains."""
    components = {component_of(place) for site in wrong for place in _made_by(site)}
    # The scores are compared where no key is padding, so that what a mask shows of it is only seen behind them.
    components |= set(ATTENTION) if components & set(ATTENTION) else set()
    found, gaps = identify_by_formula(candidate, reference, components, known)
    left = not_explained(wrong, found)
    if not left:
        return found, gaps
    read, unread = identify(candidate, reference, left, families)
    return without_echoes(_together(found, read)), [*gaps, *unread]


def not_explained(wrong: Collection[str], found: Sequence[Finding]) -> set[str]:
    """The components of the sites that no finding was read off."""
    explained = {place for one in found for place in places_of(one)}
    return {component_of(site) for site in wrong if explained.isdisjoint(_made_by(site))}


def _made_by(site: str) -> tuple[str, ...]:
    """The site, and the norm whose output it is where a block has a norm behind a sublayer."""
    name = local_name(site)
    return (site, site.removesuffix(name) + MADE_BY[name]) if name in MADE_BY else (site,)


def _together(by_formula: Sequence[Finding], read: Sequence[Finding]) -> list[Finding]:
    """Both, each knob once in a layer: a formula's value, unless what was read holds in more layers."""
    wider = [one for one in by_formula if any(_holds_beyond(other, one) for other in read)]
    kept = [one for one in by_formula if one not in wider]
    return [*kept, *(one for one in read if not any(_meets(one, other) for other in kept))]


def _holds_beyond(one: Finding, other: Finding) -> bool:
    """Whether two findings are of the same knob, and the first has every layer of the second and more."""
    return one.knob == other.knob and one.layers != other.layers and _covers(one.layers, other.layers)


def _meets(one: Finding, other: Finding) -> bool:
    """Whether two findings are of the same knob in a layer that both have."""
    whole = one.layers is None or other.layers is None
    return one.knob == other.knob and (whole or not set(one.layers or ()).isdisjoint(other.layers or ()))


def identify_by_formula(
    candidate: ByLayer, reference: ByLayer, components: Collection[str], known: Sequence[Setting] = ()
) -> tuple[list[Finding], list[NotTested]]:
    """Findings of the knobs whose formulas leave rounding (see `fit.causes`), and what could not be compared."""
    with one_thread():
        told = attempt("causes by formula", partial(causes, candidate, reference, components, known))
    if isinstance(told, NotTested):
        return [], [told]
    return _merged(told.candidate, told.reference, next(iter(candidate.values())).knobs)


def _merged(
    candidate: Sequence[KnobFit], reference: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> tuple[list[Finding], list[NotTested]]:
    """The findings of each knob in order of their names, and the knobs whose fits could not be compared."""
    findings: list[Finding] = []
    gaps: list[NotTested] = []
    for knob in sorted({fit.knob for fit in candidate}):
        mine, theirs = ([fit for fit in side if fit.knob == knob] for side in (candidate, reference))
        found = attempt(f"comparison of the fits of {knob}", partial(merge, mine, theirs, knobs))
        if isinstance(found, NotTested):
            gaps.append(found)
        else:
            findings += found
    return findings, gaps


def without_echoes(findings: Sequence[Finding]) -> list[Finding]:
    """Where the MLP reads another stream, or a norm stands elsewhere, nothing can be said of the norm and the weights that
    read it, nor of the sums."""
    parallel = [finding.layers for finding in findings if finding.knob == "residual.parallel"]
    moved = [set(finding.layers or ()) for finding in findings if finding.knob == "norm.order"]
    return [
        finding
        for finding in findings
        if not (_reads_the_stream(finding) and any(_covers(layers, finding.layers) for layers in parallel))
        and not (
            finding.knob.startswith(BEHIND_NORMS) and any(not at or set(finding.layers or ()) <= at for at in moved)
        )
    ]


def _reads_the_stream(finding: Finding) -> bool:
    """Whether a finding is of what the MLP's input is multiplied with, or of the norm before it."""
    tensor = finding.knob in READ_BY_MLP and finding.candidate_value == NOT_STORED
    return tensor or (finding.knob.startswith("norm.") and local_name(finding.site) == "ln2.out")


def _covers(layers: tuple[int, ...] | None, others: tuple[int, ...] | None) -> bool:
    """Whether a cause in some layers (None: in all) is in all of the others."""
    return layers is None or (others is not None and set(others) <= set(layers))


def fit_side(layers: Iterable[Evidence], families: Iterable[Identifier]) -> tuple[list[KnobFit], list[NotTested]]:
    """Every fit and every gap of one side; a fit that breaks off is a gap."""
    families = list(families)
    with one_thread():
        outcomes = [outcome for evidence in layers for family in families for outcome in _fitted(family, evidence)]
    fits = [outcome for outcome in outcomes if isinstance(outcome, KnobFit)]
    return fits, [outcome for outcome in outcomes if isinstance(outcome, NotTested)]


def _fitted(family: Identifier, evidence: Evidence) -> list[Outcome]:
    name = family.__module__.rpartition("identify.")[2].removesuffix(".family")
    found = attempt(f"fit `{name}` of the {evidence.side}, {where(evidence)}", partial(family, evidence))
    return [found] if isinstance(found, NotTested) else found
