"""Find what differs between both sides where error is introduced: first by formulas, then by the structure of tensors
at sites that no formula explains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from parity_audit.compare.threads import one_thread
from parity_audit.core.report import Finding
from parity_audit.core.sites import local_name
from parity_audit.core.types import NotTested
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.evidence import Evidence, KnobFit, KnobSpec, Outcome, where
from parity_audit.diagnose.findings import merge, places_of, with_followed
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.settings import Setting
from parity_audit.diagnose.fit.sides import with_norms
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.structure import projections, rows
from parity_audit.diagnose.structure.sample import NOT_STORED

BEHIND_NORMS = ("weights.attn.q", "weights.attn.k", "weights.attn.v", "weights.mlp.gate", "weights.mlp.up", "residual.")
READ_BY_MLP = ("weights.mlp.gate", "weights.mlp.up")
ATTENTION = ("scores", "pattern", "z")
"""The components of attention after queries and keys; their knobs are shared."""
Reader = Callable[[Evidence], "list[Outcome]"]
ByLayer = Mapping["int | None", Evidence]
READERS: tuple[tuple[Reader, frozenset[str]], ...] = (
    (rows.read, frozenset({"embed"})),
    (projections.read, frozenset({"qkv", "attn_proj", "mlp", "attn_out", "mlp_out", "mlp.router_logits"})),
)
"""The functions that identify structure, with the components whose sites they explain."""


def causes_at(
    candidate: ByLayer,
    reference: ByLayer,
    wrong: Collection[str],
    known: Sequence[Setting] = (),
) -> tuple[list[Finding], list[NotTested]]:
    """Findings for the sites where error is introduced.

    First come the knobs with which a component's formula leaves only rounding (see `fit.causes`, also for `known`).
    Components with a site that no formula explains are then examined for differences in structure, such as other
    weights.
    """
    components = {component_of(place) for site in wrong for place in with_followed(site)}
    # Scores are compared only where no key is padding, so an error in masking padding shows only at the pattern and at z.
    components |= set(ATTENTION) if components & set(ATTENTION) else set()
    found, gaps = identify_by_formula(candidate, reference, components, known)
    left = not_explained(wrong, found)
    if not left:
        return found, gaps
    read, unread = read_structure(candidate, reference, left)
    return without_echoes(_together(found, read)), [*gaps, *unread]


def not_explained(wrong: Collection[str], found: Sequence[Finding]) -> set[str]:
    """The components of those sites at which no finding was fitted."""
    explained = {place for one in found for place in places_of(one)}
    return {component_of(site) for site in wrong if explained.isdisjoint(with_followed(site))}


def _together(by_formula: Sequence[Finding], read: Sequence[Finding]) -> list[Finding]:
    """Both lists; a structural finding is dropped if a formula explains the same knob in one of its layers."""
    return [*by_formula, *(one for one in read if not any(_meets(one, other) for other in by_formula))]


def _meets(one: Finding, other: Finding) -> bool:
    """Whether two findings have the same knob and at least one layer in common."""
    whole = one.layers is None or other.layers is None
    return one.knob == other.knob and (whole or not set(one.layers or ()).isdisjoint(other.layers or ()))


def identify_by_formula(
    candidate: ByLayer, reference: ByLayer, components: Collection[str], known: Sequence[Setting] = ()
) -> tuple[list[Finding], list[NotTested]]:
    """Findings for the knobs with which formulas leave only rounding (see `fit.causes`), and what could not be
    compared."""
    with one_thread():
        told = attempt("causes by formula", partial(causes, candidate, reference, components, known))
    if isinstance(told, NotTested):
        return [], [told]
    findings, unmerged = _merged(told.candidate, told.reference, next(iter(candidate.values())).knobs)
    return findings, [*told.gaps, *unmerged]


def read_structure(
    candidate: ByLayer, reference: ByLayer, suspects: Collection[str]
) -> tuple[list[Finding], list[NotTested]]:
    """Findings about the structure of these components on both sides, and what could not be read.

    There is no finding where both sides have the same structure.
    """
    readers = [read for read, components in READERS if components & set(suspects)]
    own, gaps = _of_side(with_norms(candidate).values(), readers)
    others, more = _of_side(with_norms(reference).values(), readers)
    findings, unmerged = _merged(own, others, next(iter(candidate.values())).knobs)
    return without_echoes(findings), [*gaps, *more, *unmerged]


def _of_side(layers: Iterable[Evidence], readers: Sequence[Reader]) -> tuple[list[KnobFit], list[NotTested]]:
    """The fits that the readers make on one side, and the gaps; a reader that fails is a gap."""
    with one_thread():
        outcomes = [outcome for evidence in layers for reader in readers for outcome in _read(reader, evidence)]
    fits = [outcome for outcome in outcomes if isinstance(outcome, KnobFit)]
    return fits, [outcome for outcome in outcomes if isinstance(outcome, NotTested)]


def _read(reader: Reader, evidence: Evidence) -> list[Outcome]:
    what = f"structure of the {reader.__module__.rpartition('.')[2]} of the {evidence.side}, {where(evidence)}"
    found = attempt(what, partial(reader, evidence))
    return [found] if isinstance(found, NotTested) else found


def _merged(
    candidate: Sequence[KnobFit], reference: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> tuple[list[Finding], list[NotTested]]:
    """The findings of each knob, in the order of the knobs' names, and the knobs whose fits could not be compared."""
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
    """Remove findings that another finding makes meaningless.

    In a layer where the MLP reads another stream (`residual.parallel`), findings about the norm before the MLP and
    about the weights that read it are removed. In a layer where a norm stands elsewhere (`norm.order`), findings about
    the weights that read the norm and about the residual sums are removed.
    """
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
    """Whether a finding is about the norm before the MLP, or says that the MLP's input weights are not the
    checkpoint's."""
    tensor = finding.knob in READ_BY_MLP and finding.candidate_value == NOT_STORED
    return tensor or (finding.knob.startswith("norm.") and local_name(finding.site) == "ln2.out")


def _covers(layers: tuple[int, ...] | None, others: tuple[int, ...] | None) -> bool:
    """Whether the layers of one cause (None: all) include all layers of another."""
    return layers is None or (others is not None and set(others) <= set(layers))
