"""Describe the output of components that no constant explains, as a function of what they should compute (see `forms`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.capture.store import Capture
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import limit_of
from parity_audit.core.report import Finding
from parity_audit.core.sites import ATTENTION_SITES, layer_of, local_name, site_order
from parity_audit.core.types import KnobValue, NotTested, Probe
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.confidence import DESCRIBED, confidence
from parity_audit.diagnose.evidence import EXPLAINED_BY, FORMULA, f64, real
from parity_audit.diagnose.findings import MADE_BY, is_approximate_projection, remainder_of, shown
from parity_audit.diagnose.forms.attended import attended, averaged, neighbours
from parity_audit.diagnose.forms.described import described, descriptions
from parity_audit.diagnose.forms.elementwise import ACTIVATION, elementwise
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.structure.sample import NOT_STORED
from parity_audit.diagnose.thresholds import ALIKE, CLEAN, CLEARLY_MORE

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")
MEASURED = ("gain", "bias", "norm", ACTIVATION)
"""Kinds of descriptions that state a size or range of the difference over all tokens or channels; it may vary by layer."""
MOST_TOKENS = 512
"""Number of tokens that descriptions are fitted on: more tokens add nothing, and cost memory in wide models."""
COPIED, UNIFORM = "equal to pattern", "uniform over the keys"
INVALIDATED_BY = {COPIED: "pattern", UNIFORM: "z"}
"""The component that the judge replays from a site with this description. Since it is replayed from a wrong tensor, an
unexplained finding about it is dropped."""
STREAM = (
    "resid_pre", "altup.active", "ln1.out", "laurel.out", "attn_proj", "ln1_post.out", "attn_out", "resid_mid", "ln2.out",
    "mlp_proj", "ln2_post.out", "mlp_out", "altup.activated", "resid_post",
)  # fmt: skip
STREAMS = ("altup.pre", "altup.predicted", "altup.corrected", "altup.post")
SPACES = (STREAM, STREAMS, ("q", "q_norm.out", "rot_q"), ("k", "k_norm.out", "rot_k"))
"""Groups of sites of a block whose tensors have the same axes, in the order in which they are computed."""
PARALLEL_SITES = (("q", "k", "v"), ("q_latent", "kv_latent"), ("mlp.pre", "mlp.pre_linear"))
"""Groups of sites of one component that are computed independently of each other."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One side's capture (`own`), and the judge's replay of it (`true`): every site as the judge computes it from that
    side's own inputs.

    `activation` is the MLP's activation in the spec.
    """

    own: Capture
    true: Capture
    ratios: Mapping[tuple[str, str], float]
    d_head: int
    activation: KnobValue = None


@one_thread()
def with_descriptions(findings: Sequence[Finding], sides: Replayed) -> tuple[list[Finding], list[NotTested]]:
    """Replace findings that are only "unexplained" by descriptions, layer by layer, where one is found; also return the
    gaps."""
    out: list[Finding] = []
    gaps: list[NotTested] = []
    for finding in findings:
        found = attempt(f"description of what {finding.knob} does", partial(_described, finding, sides))
        gaps += [found] if isinstance(found, NotTested) else []
        out += [finding] if isinstance(found, NotTested) else found
    out = _joined(out)
    behind = {(INVALIDATED_BY[str(finding.candidate_value)], layer) for finding in out
              if finding.candidate_value in (COPIED, UNIFORM) for layer in finding.layers or ()}  # fmt: skip
    return [finding for finding in out if not _follows_from(finding, behind)], gaps


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal descriptions of one site into one finding with the layers of all of them."""
    out: list[Finding] = []
    for finding in findings:
        alike = (one for one in out if one.knob == finding.knob and _says_the_same(one, finding))
        home = next(alike, None) if "where" in finding.evidence else None
        if home is None:
            out.append(finding)
        else:
            layers = tuple(sorted({*(home.layers or ()), *(finding.layers or ())})) or None
            out[out.index(home)] = dataclasses.replace(home, layers=layers)
    return out


def _says_the_same(one: Finding, other: Finding) -> bool:
    alike = _same_value(one.knob, one.candidate_value, other.candidate_value)
    return alike and one.evidence.get("where") == other.evidence.get("where")


def _described(finding: Finding, sides: Replayed) -> list[Finding]:
    if finding.kind == "unexplained":
        return _explained(finding, sides)
    return (
        _better(finding, sides)
        if is_approximate_projection(finding) or finding.candidate_value == NOT_STORED
        else [finding]
    )


def _better(finding: Finding, sides: Replayed) -> list[Finding]:
    """Replace a finding about the weights of a projection by a description of its output, if that leaves clearly less.

    A projection whose output is nearly what the checkpoint's weights give, scaled, or is not what they give, may in
    truth be the right output that was clamped, rounded or normalised. A finding that only says "not the checkpoint's"
    is replaced by any description that is found.
    """
    own = [site for _, site in sides.ratios if local_name(site) == local_name(finding.site)]
    about = {**finding.evidence, "component": component_of(finding.site), "sites": own}
    asked = dataclasses.replace(finding, kind="unexplained", evidence=about)
    found = _explained(asked, sides)
    if any(item.kind == "unexplained" for item in found):
        return [finding]
    clear = all(CLEARLY_MORE * float(item.evidence["unexplained"]) < remainder_of(finding) for item in found)
    return found if clear or finding.candidate_value == NOT_STORED else [finding]


def _follows_from(finding: Finding, behind: set[tuple[str, int]]) -> bool:
    mine = {(finding.knob, layer) for layer in finding.layers or ()}
    return finding.kind == "unexplained" and bool(mine) and mine <= behind


def _explained(finding: Finding, sides: Replayed) -> list[Finding]:
    sites = _introducing(finding, sides)
    layers = finding.layers or sorted({layer_of(site) for site in sites}, key=lambda x: x or 0)
    found = {layer: _forms(sites, layer, sides) for layer in layers}
    left = tuple(layer for layer in layers if layer is not None and not found[layer])
    groups = _shared(
        [_Group(form=form, name=local_name(site), sites=[site]) for layer in layers for site, form in found[layer]],
        sides,
    )
    if not groups:
        return [finding]
    return [
        *(_finding(finding, group) for group in groups),
        *([dataclasses.replace(finding, layers=left)] if left else []),
    ]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """One description, and the sites of one name (in one layer each) that it holds for."""

    form: Description
    name: str
    sites: list[str]


def _shared(found: Sequence[_Group], sides: Replayed) -> list[_Group]:
    """Group the sites of one name that have the same description.

    If descriptions differ between layers, the one that holds in most layers takes over every layer that it fits as
    well: activations in which one key or one token dominates fit several descriptions.
    """
    groups: list[_Group] = []
    for one in found:
        home = next((group for group in groups if group.name == one.name and _alike(group.form, one.form)), None)
        if home is None:
            groups.append(one)
        else:
            home.sites.extend(one.sites)
    for wide in sorted(groups, key=lambda group: -len(group.sites)):
        for other in [other for other in groups if other is not wide and other.name == wide.name]:
            for site in [*other.sites] if len(wide.sites) > len(other.sites) else ():
                if any(_alike(wide.form, form) for form in _every_form(site, sides)):
                    other.sites.remove(site)
                    wide.sites.append(site)
    return [dataclasses.replace(group, sites=sorted(group.sites, key=site_order)) for group in groups if group.sites]


def _every_form(site: str, sides: Replayed) -> Iterator[Description]:
    """Every description that fits a site's values, or fits the value vectors that its attention averaged."""
    pair, values = _pairs(site, sides)
    yield from () if pair is None else descriptions(pair)
    yield from () if values is None else map(_of_values, descriptions(values))
    yield from map(_of_values, filter(None, [_averaged(site, sides)]))


def _forms(sites: Iterable[str], layer: int | None, sides: Replayed) -> list[tuple[str, Description]]:
    """The first of these sites in this layer that has a description, with that description.

    Sites that are listed in `PARALLEL_SITES` together with it are described as well: each of them is computed from the
    component's input, and none from the other.
    """
    own = sorted((site for site in sites if layer_of(site) == layer), key=site_order)
    found: list[tuple[str, Description]] = []
    for site in own:
        beside = next((names for names in PARALLEL_SITES if local_name(site) in names), ())
        if found and not all(local_name(other) in beside for other, _ in found):
            continue
        form = _form(site, sides)
        found += [] if form is None else [(site, form)]
    return found


def _form(site: str, sides: Replayed) -> Description | None:
    """The description of a site's values, None if there is none."""
    if site.endswith(".attn_scores") and _is_pattern(site, sides.own):
        return Description(kind="source", value=COPIED, usual="as computed", share_left=0.0)
    if site.endswith(".pattern") and _is_uniform(site, sides.own):
        return Description(kind="source", value=UNIFORM, usual="as computed", share_left=0.0)
    pair, values = _pairs(site, sides)
    form = None if pair is None else described(pair)
    if pair is not None and local_name(site) == "mlp.post":
        activation = _activation(site, pair, sides)
        # A function of what the activation should give is one of what it reads, and is named by the knob.
        is_curve = form is not None and form.kind == "curve"
        if activation is not None:
            form = activation if is_curve else better_description(form, activation)
    behind = _averaged(site, sides) or (None if values is None else described(values))
    return form if behind is None else better_description(form, _of_values(behind))


def _activation(site: str, pair: ActualExpected, sides: Replayed) -> Description | None:
    """The description of an MLP's output as one function of each number of its gate's projection, None if it is none."""
    probes = _probes_with(site, sides)
    inputs = [site.removesuffix("post") + name for name in ("pre", "pre_linear")]
    pre, linear = (
        _tokens(sides.own, probes, name) if all(name in sides.own.sites(probe.name) for probe in probes) else None
        for name in inputs
    )
    if sides.activation is None or pre is None or pre.shape != pair.own.shape:
        return None
    return elementwise(pair, pre, linear, sides.activation)


def _averaged(site: str, sides: Replayed) -> Description | None:
    return averaged(site, sides.own, sides.true) if local_name(site) == "z" else None


def _pairs(site: str, sides: Replayed) -> tuple[ActualExpected | None, ActualExpected | None]:
    """Pair a site's own tensor with the true one; for z, also pair the values it attended to with those of `v`."""
    pair = None if site.endswith(ATTENTION_SITES) else _pair(site, sides)
    return pair, attended(site, sides.own, sides.true, sides.d_head) if local_name(site) == "z" else None


def _of_values(form: Description) -> Description:
    return dataclasses.replace(form, kind=f"values.{form.kind}")


def better_description(form: Description | None, behind: Description) -> Description:
    """Choose the description of the attended values if it leaves clearly less than that of z itself, else that of z.

    Where one key has nearly all the weight, both descriptions fit about equally well.
    """
    return behind if form is None or behind.share_left * CLEARLY_MORE < form.share_left else form


def _introducing(finding: Finding, sides: Replayed) -> set[str]:
    """The sites that a finding leaves unexplained, or all sites of its component that introduce error if it names none."""
    component, named = finding.evidence["component"], finding.evidence.get("sites")
    wrong = (site for (_, site), ratio in sides.ratios.items() if ratio > limit_of(site))
    return {site for site in wrong if component_of(site) == component and (named is None or site in named)}


def _is_pattern(site: str, capture: Capture) -> bool:
    """Whether the tensors captured as scores equal the pattern, that is, the output of the softmax."""
    both = site, site.removesuffix("attn_scores") + "pattern"
    held = (probe.name for probe in capture.probes if set(both) <= capture.sites(probe.name))
    pairs = [(capture.tensor(name, both[0]), capture.tensor(name, both[1])) for name in held]
    return bool(pairs) and all(scores.equal(pattern) for scores, pattern in pairs)


def _is_uniform(site: str, capture: Capture) -> bool:
    """Whether every query gives the same weight to every key that it attends to."""
    patterns = [f64(capture.tensor(probe.name, site)) for probe in capture.probes if site in capture.sites(probe.name)]
    return bool(patterns) and all(_even(pattern) for pattern in patterns)


def _even(pattern: Tensor) -> bool:
    seen = (pattern > 0).to(pattern)
    return torch.allclose(pattern, seen / seen.sum(-1, keepdim=True).clamp_min(1), rtol=CLEAN, atol=0.0)


def _probes_with(site: str, sides: Replayed) -> list[Probe]:
    """The probes in which a site is both captured and replayed."""
    return [probe for probe in sides.true.probes if site in sides.true.sites(probe.name) & sides.own.sites(probe.name)]


def _pair(site: str, sides: Replayed) -> ActualExpected | None:
    probes = _probes_with(site, sides)
    if not probes:
        return None
    own, true = (_tokens(capture, probes, site) for capture in (sides.own, sides.true))
    return ActualExpected(own=own, true=true, d_head=sides.d_head, others=_others(site, probes, own, sides.own))


def _others(site: str, probes: Sequence[Probe], own: Tensor, capture: Capture) -> dict[str, Tensor]:
    """Tensors of the same shape as this site's: of earlier sites of its block, and of the same site in nearby blocks.

    For the output of a sublayer (`attn_out`, `mlp_out`) the post-norm that produces it is left out, as both are the
    same.
    """
    name = local_name(site)
    space = next((sites for sites in SPACES if name in sites), ())
    prefix = site.removesuffix(name)
    earlier = [other for other in space[: space.index(name)] if other != MADE_BY.get(name)] if space else []
    before = [prefix + other for other in earlier] if space else _entering(site, probes, capture)
    near = {f"{name} of block {block}": f"blocks.{block}.{name}" for block in neighbours(site)}
    wanted = {**{local_name(other): other for other in before}, **near}
    held = {
        words: other for words, other in wanted.items() if all(other in capture.sites(probe.name) for probe in probes)
    }
    found = {words: _tokens(capture, probes, other) for words, other in held.items()}
    return {words: x for words, x in found.items() if x.shape == own.shape}


def _entering(site: str, probes: Sequence[Probe], capture: Capture) -> list[str]:
    """The input sites of the norms outside the blocks."""
    ends = sorted((other for other in capture.sites(probes[0].name) if other.endswith(".resid_post")), key=site_order)
    return {"ln_final.out": ends[-1:], "embed_ln.out": ["embed"]}.get(site, [])


def _tokens(capture: Capture, probes: Sequence[Probe], site: str) -> Tensor:
    """Real tokens of all probes, `[token, channel]`, at most the first `MOST_TOKENS` of them."""
    rows = [f64(capture.tensor(probe.name, site)[real(probe)]) for probe in probes]
    return torch.cat([rearrange(part, "token ... -> token (...)") for part in rows])[:MOST_TOKENS]


def _alike(a: Description, b: Description) -> bool:
    if a.kind != b.kind or a.channels != b.channels:
        return False
    return _same_value(a.kind, a.value, b.value)


def _same_value(kind: str, a: KnobValue, b: KnobValue) -> bool:
    """Whether two descriptions of one kind are equal. For kinds that state a measured size, the numbers may differ."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= ALIKE * max(abs(a), abs(b))
    if kind.endswith(MEASURED):
        return NUMBER.sub("", str(a)) == NUMBER.sub("", str(b))
    return a == b


def _finding(unexplained: Finding, group: _Group) -> Finding:
    numbers = tuple(layer for site in group.sites if (layer := layer_of(site)) is not None)
    form, site, name = group.form, group.sites[0], group.name
    said = f"{shown(form.value)}{f' ({form.where})' if form.where else ''}"
    is_knob = form.kind == ACTIVATION
    return dataclasses.replace(
        unexplained, knob=form.kind if is_knob else f"{name}.{form.kind}", kind="variant", layers=numbers or None,
        site=site, spec_value=form.usual if is_knob else unexplained.spec_value, reference_value=form.usual,
        candidate_value=form.value, departs_from_spec="candidate",
        evidence={**unexplained.evidence, "where": form.where or "everywhere", "unexplained": form.share_left,
                  **({EXPLAINED_BY: FORMULA} if form.rest <= CLEAN else {})},
        confidence=confidence([DESCRIBED]),
        message=f"given its own inputs, {name} of the candidate is not what the reference makes of them: {form.kind} {said}",
    )  # fmt: skip
