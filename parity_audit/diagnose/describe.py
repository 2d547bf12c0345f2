"""Components that no constant explains, described by what they made of their own inputs (see `forms`)."""

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
from parity_audit.diagnose.findings import MADE_BY, is_nearly, remainder_of, shown
from parity_audit.diagnose.forms.attended import attended, averaged, neighbours
from parity_audit.diagnose.forms.described import described, descriptions
from parity_audit.diagnose.forms.pair import Form, Pair
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.structure.sample import NOT_STORED
from parity_audit.diagnose.thresholds import ALIKE, CLEAN, CLEARLY_MORE

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")
MEASURED = ("gain", "bias", "norm")
"""Kinds of descriptions whose words give the size or range of what differs in every token or channel."""
MOST_TOKENS = 512
"""Tokens that a description is searched in: more say no more, and cost memory in wide models."""
COPIED, UNIFORM = "equal to pattern", "uniform over the keys"
BEHIND = {COPIED: "pattern", UNIFORM: "z"}
"""What is replayed from such a site cannot be right."""
STREAM = (
    "resid_pre", "altup.active", "ln1.out", "laurel.out", "attn_proj", "ln1_post.out", "attn_out", "resid_mid", "ln2.out",
    "mlp_proj", "ln2_post.out", "mlp_out", "altup.activated", "resid_post",
)  # fmt: skip
STREAMS = ("altup.pre", "altup.predicted", "altup.corrected", "altup.post")
SPACES = (STREAM, STREAMS, ("q", "q_norm.out", "rot_q"), ("k", "k_norm.out", "rot_k"))
"""Sites of a block whose tensors have the same axes, in the order of the data."""
BESIDE = (("q", "k", "v"), ("q_latent", "kv_latent"), ("mlp.pre", "mlp.pre_linear"))
"""Sites of one component none of which is made of another."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One side's capture, and the judge's replay of it: what every site should be, given that side's own inputs."""

    own: Capture
    true: Capture
    ratios: Mapping[tuple[str, str], float]
    d_head: int


@one_thread()
def with_descriptions(findings: Sequence[Finding], sides: Replayed) -> tuple[list[Finding], list[NotTested]]:
    """The findings, those that say only "unexplained" replaced by what can be said, layer by layer; and what broke off."""
    out: list[Finding] = []
    gaps: list[NotTested] = []
    for finding in findings:
        found = attempt(f"description of what {finding.knob} does", partial(_described, finding, sides))
        gaps += [found] if isinstance(found, NotTested) else []
        out += [finding] if isinstance(found, NotTested) else found
    out = _joined(out)
    behind = {(BEHIND[str(finding.candidate_value)], layer) for finding in out
              if finding.candidate_value in (COPIED, UNIFORM) for layer in finding.layers or ()}  # fmt: skip
    return [finding for finding in out if not _follows_from(finding, behind)], gaps


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """Descriptions of one site that say the same, each once, with the layers of all of them."""
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
    return _better(finding, sides) if is_nearly(finding) or finding.candidate_value == NOT_STORED else [finding]


def _better(finding: Finding, sides: Replayed) -> list[Finding]:
    """What is nearly the checkpoint's weights, scaled, or simply not these, may be what they make, clamped, rounded or normalised:
    if that leaves clearly less, it is said instead."""
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
    """One description, and the sites of one name, in one layer each, that it holds of."""

    form: Form
    name: str
    sites: list[str]


def _shared(found: Sequence[_Group], sides: Replayed) -> list[_Group]:
    """Sites of one name with the same description together. Where they differ, that of most layers stands for every layer where
    it fits as well: activations of which one key or one token has nearly all fit several descriptions."""
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


def _every_form(site: str, sides: Replayed) -> Iterator[Form]:
    """Every description that fits the values of a site, or those that its attention averaged."""
    pair, values = _pairs(site, sides)
    yield from () if pair is None else descriptions(pair)
    yield from () if values is None else map(_of_values, descriptions(values))
    yield from map(_of_values, filter(None, [_averaged(site, sides)]))


def _forms(sites: Iterable[str], layer: int | None, sides: Replayed) -> list[tuple[str, Form]]:
    """The first of these sites in this layer whose values have a form, with that form, and the sites of `BESIDE` it with theirs:
    each of them follows from the component's input, and none from the other."""
    own = sorted((site for site in sites if layer_of(site) == layer), key=site_order)
    found: list[tuple[str, Form]] = []
    for site in own:
        beside = next((names for names in BESIDE if local_name(site) in names), ())
        if found and not all(local_name(other) in beside for other, _ in found):
            continue
        form = _form(site, sides)
        found += [] if form is None else [(site, form)]
    return found


def _form(site: str, sides: Replayed) -> Form | None:
    """The form that the values of a site have."""
    if site.endswith(".attn_scores") and _is_pattern(site, sides.own):
        return Form(kind="source", value=COPIED, usual="as computed", left=0.0)
    if site.endswith(".pattern") and _is_uniform(site, sides.own):
        return Form(kind="source", value=UNIFORM, usual="as computed", left=0.0)
    pair, values = _pairs(site, sides)
    form = None if pair is None else described(pair)
    behind = _averaged(site, sides) or (None if values is None else described(values))
    return form if behind is None else nearer(form, _of_values(behind))


def _averaged(site: str, sides: Replayed) -> Form | None:
    return averaged(site, sides.own, sides.true) if local_name(site) == "z" else None


def _pairs(site: str, sides: Replayed) -> tuple[Pair | None, Pair | None]:
    """What a site holds beside what it should hold; and of z the values that were attended to beside those of `v`."""
    pair = None if site.endswith(ATTENTION_SITES) else _pair(site, sides)
    return pair, attended(site, sides.own, sides.true, sides.d_head) if local_name(site) == "z" else None


def _of_values(form: Form) -> Form:
    return dataclasses.replace(form, kind=f"values.{form.kind}")


def nearer(form: Form | None, behind: Form) -> Form:
    """What was done to attended values, where it leaves clearly less than anything said of z itself: where one key has nearly
    all the weight, the two are nearly one."""
    return behind if form is None or behind.left * CLEARLY_MORE < form.left else form


def _introducing(finding: Finding, sides: Replayed) -> set[str]:
    """The sites that a finding leaves unexplained; all of its component that introduce error where it names none."""
    component, named = finding.evidence["component"], finding.evidence.get("sites")
    wrong = (site for (_, site), ratio in sides.ratios.items() if ratio > limit_of(site))
    return {site for site in wrong if component_of(site) == component and (named is None or site in named)}


def _is_pattern(site: str, capture: Capture) -> bool:
    """Whether what goes by the name of scores is what the softmax made of them."""
    both = site, site.removesuffix("attn_scores") + "pattern"
    held = (probe.name for probe in capture.probes if set(both) <= capture.sites(probe.name))
    pairs = [(capture.tensor(name, both[0]), capture.tensor(name, both[1])) for name in held]
    return bool(pairs) and all(scores.equal(pattern) for scores, pattern in pairs)


def _is_uniform(site: str, capture: Capture) -> bool:
    """Whether every query attends to as many keys as it sees, to each as much."""
    patterns = [f64(capture.tensor(probe.name, site)) for probe in capture.probes if site in capture.sites(probe.name)]
    return bool(patterns) and all(_even(pattern) for pattern in patterns)


def _even(pattern: Tensor) -> bool:
    seen = (pattern > 0).to(pattern)
    return torch.allclose(pattern, seen / seen.sum(-1, keepdim=True).clamp_min(1), rtol=CLEAN, atol=0.0)


def _pair(site: str, sides: Replayed) -> Pair | None:
    probes = [
        probe for probe in sides.true.probes if site in sides.true.sites(probe.name) & sides.own.sites(probe.name)
    ]
    if not probes:
        return None
    own, true = (_tokens(capture, probes, site) for capture in (sides.own, sides.true))
    return Pair(own=own, true=true, d_head=sides.d_head, others=_others(site, probes, own, sides.own))


def _others(site: str, probes: Sequence[Probe], own: Tensor, capture: Capture) -> dict[str, Tensor]:
    """Sites of the same block that come before this one and live in the same space, but for the norm whose output it is."""
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
    """What the norms outside the blocks are given."""
    ends = sorted((other for other in capture.sites(probes[0].name) if other.endswith(".resid_post")), key=site_order)
    return {"ln_final.out": ends[-1:], "embed_ln.out": ["embed"]}.get(site, [])


def _tokens(capture: Capture, probes: Sequence[Probe], site: str) -> Tensor:
    """Real tokens of all probes, `[token, channel]`, at most `MOST_TOKENS` of them."""
    rows = [f64(capture.tensor(probe.name, site)[real(probe)]) for probe in probes]
    return torch.cat([rearrange(part, "token ... -> token (...)") for part in rows])[:MOST_TOKENS]


def _alike(a: Form, b: Form) -> bool:
    if a.kind != b.kind or a.channels != b.channels:
        return False
    return _same_value(a.kind, a.value, b.value)


def _same_value(kind: str, a: KnobValue, b: KnobValue) -> bool:
    """Whether two descriptions of one kind say the same. Where the words of a kind give a measure, it may differ by layer."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= ALIKE * max(abs(a), abs(b))
    if kind.endswith(MEASURED):
        return NUMBER.sub("", str(a)) == NUMBER.sub("", str(b))
    return a == b


def _finding(unexplained: Finding, group: _Group) -> Finding:
    numbers = tuple(layer for site in group.sites if (layer := layer_of(site)) is not None)
    form, site, name = group.form, group.sites[0], group.name
    said = f"{shown(form.value)}{f' ({form.where})' if form.where else ''}"
    return dataclasses.replace(
        unexplained, knob=f"{name}.{form.kind}", kind="variant", layers=numbers or None, site=site,
        candidate_value=form.value, reference_value=form.usual, departs_from_spec="candidate",
        evidence={**unexplained.evidence, "where": form.where or "everywhere", "unexplained": form.left,
                  **({EXPLAINED_BY: FORMULA} if form.rest <= CLEAN else {})},
        confidence=confidence([DESCRIBED]),
        message=f"given its own inputs, {name} of the candidate is not what the reference makes of them: {form.kind} {said}",
    )  # fmt: skip
