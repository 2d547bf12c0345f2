"""Find causes that show only while a candidate decodes from its KV cache, by fitting the decoded tokens.

In a whole run all tokens of a probe are computed in one forward pass. A component that computes each token by itself is
fitted on the decoded tokens alone; positions and attention are fitted on the decoded tokens with the prompt before
them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from parity_audit.core.report import Finding
from parity_audit.core.sites import layer_of
from parity_audit.core.types import NotTested, Probe
from parity_audit.diagnose.agreement import SIGMAS, is_number, same
from parity_audit.diagnose.evidence import Evidence
from parity_audit.diagnose.extent import DECODED, ONE_AT_A_TIME, SEVERAL_AT_A_TIME, is_of_decoding, only_where
from parity_audit.diagnose.findings import is_approximate_projection, is_by_formula, places_of, stderr_of, unexplained
from parity_audit.diagnose.fit.causes import departing
from parity_audit.diagnose.fit.settings import Setting
from parity_audit.diagnose.fitting import ATTENTION, ByLayer, causes_at
from parity_audit.diagnose.localise import component_of
from parity_audit.formulas.knobs import KNOBS

READS_OTHERS = (*ATTENTION, "rope", "pos_embed", "delta")
"""Components whose output for a token depends on the tokens before it or on the token's position."""


def decoded_probes(probes: Iterable[Probe]) -> set[str]:
    """The names of the probes whose last tokens candidates decode step by step."""
    return {probe.name for probe in probes if probe.decode_from is not None}


def only_decoded(found: Collection[str], everywhere: Collection[str]) -> set[str]:
    """The suspects of decoded tokens that are right in whole runs.

    Decoding shows no attention scores and no pattern, so an error of these appears at z. If any attention component is
    wrong in whole runs as well, all of them are left out.
    """
    hidden = set(ATTENTION) if set(ATTENTION) & set(everywhere) else set()
    return set(found) - set(everywhere) - hidden


def run_whole(layers: ByLayer) -> dict[int | None, Evidence]:
    """The evidence of the probes that every side computes in one forward pass, without decoding."""
    return _only(layers, [probe for one in layers.values() for probe in one.probes if probe.decode_from is None])


def identify_decoded(
    candidate: ByLayer, reference: ByLayer, wrong: Collection[str], whole: Sequence[Finding] = (),
    probes: Collection[str] | None = None,
) -> tuple[list[Finding], list[NotTested]]:  # fmt: skip
    """Findings for sites whose components are right in whole runs and wrong in decoded tokens.

    Components that compute each token by itself are explained on the decoded tokens alone. Positions and attention are
    explained with the prompt included; the causes of `whole` runs are tried first, and probes whose attention they
    explain are left out. If no cause explains the attention of all remaining probes, each probe is explained by itself,
    because a step of one token may have one fault and a step of several tokens another. Sites that remain without a
    cause are reported here as unexplained, so that a cause found in whole runs for the same component does not count as
    their explanation.

    Args:
        probes: names of the decoded probes to explain, by default all. Programs use other code for one token than for
            several, and for padded rows, so the cause for one probe need not explain the others.
    """
    if not wrong:
        return [], []
    every = next(iter(candidate.values())).probes
    asked = [probe for probe in every if probe.decode_from is not None and (probes is None or probe.name in probes)]
    alone = [site for site in wrong if component_of(site) not in READS_OTHERS]
    found, gaps = causes_at(_tokens(_only(candidate, asked)), _tokens(_only(reference, asked)), alone)
    reading, known = [site for site in wrong if site not in alone], _settings(whole)

    def is_new(probe: Probe) -> bool:
        return bool(departing(reading, _only(candidate, [probe]), _only(reference, [probe]), known))

    def explained(probes: Sequence[Probe]) -> tuple[list[Finding], list[NotTested]]:
        return _attended(_only(candidate, probes), _only(reference, probes), reading, known)

    new = [probe for probe in asked if is_new(probe)] if known else asked
    more, missing = explained(new) if new and reading else ([], [])
    shown = [(probe, more) for probe in new]
    if len(new) > 1 and any(item.kind == "unexplained" for item in more):
        apart = [explained([probe]) for probe in new]
        shown = [(probe, findings) for probe, (findings, _) in zip(new, apart, strict=True)]
        missing = list(dict.fromkeys(gap for _, gaps in apart for gap in gaps))
    return [*found, *_each_once(shown, asked)], [*gaps, *missing]


def _each_once(shown: Sequence[tuple[Probe, Sequence[Finding]]], asked: Sequence[Probe]) -> list[Finding]:
    """The findings of the decoded probes, without duplicates.

    A finding is limited to steps of one token, or to steps of several tokens, if all probes that show it have steps of
    that kind only and some asked probe that does not show it has steps of the other kind.
    """
    found: list[Finding] = []
    for item in (item for _, findings in shown for item in findings):
        if any(says_the_same(item, other) for other in found):
            continue
        where = [probe for probe, others in shown if any(says_the_same(item, other) for other in others)]
        steps, elsewhere = ({probe.at_once > 1 for probe in some} for some in (where, set(asked) - set(where)))
        several = SEVERAL_AT_A_TIME if True in steps else ONE_AT_A_TIME
        found.append(only_where(item, several) if len(steps) == 1 and elsewhere - steps else item)
    return found


def _attended(
    own: ByLayer, true: ByLayer, sites: Sequence[str], known: Sequence[Setting]
) -> tuple[list[Finding], list[NotTested]]:
    """Causes for components that read earlier tokens or positions, and unexplained attention sites; also the gaps."""
    found, gaps = causes_at(own, true, sites, known)
    attended = departing([site for site in sites if component_of(site) in ATTENTION], own, true)
    left = unexplained({site: [site] for site in attended}, found)
    return [*found, *(only_where(item, DECODED) for item in left)], gaps


def without_unexplained_in_whole_runs(
    decoded: Collection[str], whole: Collection[str], findings: Sequence[Finding]
) -> list[str]:
    """The sites wrong in decoded tokens, without components that are also wrong, and unexplained, in whole runs.

    The comparison is made per block and component. Such a site is left out because a formula that computes each token
    by itself fits a single decoded token too easily: over one token, any sum over tokens is the token itself. That
    formula need not be what is wrong.
    """
    explained = {place for item in findings for place in places_of(item)}
    left = {_part_of(site) for site in whole if site not in explained}
    return [site for site in decoded if _part_of(site) not in left]


def _part_of(site: str) -> tuple[int | None, str]:
    """The block of a site and its component; scores, pattern and z count as one, since decoded tokens show only z."""
    component = component_of(site)
    return layer_of(site), ATTENTION[-1] if component in ATTENTION else component


def _settings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The candidate's settings according to the findings that a formula explains.

    First come the settings that hold together in a layer, largest first, then the value of each finding alone. Findings
    about the weights of a projection are left out, since no formula has a knob for them.
    """
    fitted = [item for item in findings if item.knob in KNOBS and is_by_formula(item)]
    layers = dict.fromkeys(layer for item in fitted for layer in item.layers or (None,))
    together = [
        {item.knob: item.candidate_value for item in fitted if item.layers is None or layer in item.layers}
        for layer in layers
    ]
    every = [*sorted(together, key=len, reverse=True), *({item.knob: item.candidate_value} for item in fitted)]
    return [one for place, one in enumerate(every) if one not in every[:place]]


def not_in(whole: Sequence[Finding], decoded: Sequence[Finding], suspects: Collection[str]) -> list[Finding]:
    """The findings of decoded tokens that whole runs lack: a cause in whole runs holds in decoded tokens too.

    A finding is limited to decoded tokens if whole runs have another value of the same knob, or if its component is not
    among their `suspects`.
    """
    new = [
        item for item in decoded
        if not any(says_the_same(item, known) or _rounds(known, item) or _nears(known, item) for known in whole)
    ]  # fmt: skip
    knobs = {item.knob for item in whole}

    def holds_in_whole_runs(item: Finding) -> bool:
        return item.knob not in knobs and component_of(item.site) in suspects

    return [item if is_of_decoding(item) or holds_in_whole_runs(item) else only_where(item, DECODED) for item in new]


def _rounds(whole: Finding, decoded: Finding) -> bool:
    """Whether whole runs found a narrow dtype where decoded tokens gave a constant.

    Over a few tokens, the rounding of a narrow dtype can look like another value of a constant.
    """
    same_place = places_of(whole) & places_of(decoded)
    return whole.knob.endswith(".dtype") and decoded.kind == "constant" and bool(same_place)


def _nears(whole: Finding, decoded: Finding) -> bool:
    """Whether both findings say that other weights nearly reproduce a projection.

    The numbers of a description that leaves more than rounding depend on the tokens it was fitted on, so they may
    differ between whole runs and decoded tokens.
    """
    return (
        is_approximate_projection(whole)
        and is_approximate_projection(decoded)
        and whole.knob == decoded.knob
        and _share_layers(whole, decoded)
    )


def says_the_same(a: Finding, b: Finding) -> bool:
    """Whether two findings have the same knob and value, and the layers of one include those of the other."""
    return a.knob == b.knob and _share_layers(a, b) and _same_value(a, b)


def _share_layers(a: Finding, b: Finding) -> bool:
    layers = [set(item.layers) for item in (a, b) if item.layers is not None]
    return len(layers) < 2 or layers[0] <= layers[1] or layers[1] <= layers[0]


def _same_value(a: Finding, b: Finding) -> bool:
    """Whether two values are equal within their errors: a few decoded tokens give larger errors."""
    x, y = a.candidate_value, b.candidate_value
    if same(x, y):
        return True
    errors = [stderr_of(item, "candidate") for item in (a, b)]
    return is_number(x) and is_number(y) and abs(x - y) <= SIGMAS * math.hypot(*errors)  # type: ignore[operator]


def _only(layers: ByLayer, probes: Sequence[Probe]) -> dict[int | None, Evidence]:
    """The evidence of each layer, limited to these probes."""
    names = {probe.name for probe in probes}
    return {layer: replace(one, probes=tuple(probe for probe in one.probes if probe.name in names))
            for layer, one in layers.items()}  # fmt: skip


def _tokens(layers: Mapping[int | None, Evidence]) -> dict[int | None, Evidence]:
    """The evidence of the decoded tokens, without their prompts."""
    return {layer: _without_prompt(evidence, evidence.probes) for layer, evidence in layers.items()}


def _without_prompt(evidence: Evidence, probes: Sequence[Probe]) -> Evidence:
    first = {probe.name: probe.decode_from or 0 for probe in probes}

    def tensor(probe: str, site: str) -> Tensor | None:
        whole = evidence.tensor(probe, site)
        return None if whole is None else whole[:, first[probe] :]

    cut = tuple(_behind(probe, first[probe.name]) for probe in probes)
    return replace(evidence, probes=cut, tensor=tensor)


def _behind(probe: Probe, first: int) -> Probe:
    """The tokens of a probe from position `first` on, as a probe; `kept` records their original positions."""
    return replace(probe.columns(first, None), kept=tuple(range(first, probe.shape[1])), decode_from=None)
