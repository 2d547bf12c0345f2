"""Weights that are rounded to one format are one matter: a quantised model, not a wrong tensor for each of its projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from parity_audit.checks.weights import roles_of_knob
from parity_audit.core.report import Finding
from parity_audit.core.sites import local_name

KNOB = "weights.format"
ROUNDED = "the checkpoint's rounded to "
TensorOf = Mapping[tuple[str, "int | None"], str]


def quantised_as_one(findings: Sequence[Finding], tensor_of: TensorOf) -> list[Finding]:
    """The findings with several projections of the same layers that are rounded alike as one, which stands for those that only
    say that these tensors differ as well.

    Args:
        findings: of one candidate.
        tensor_of: the checkpoint tensor of a role in a layer (None: outside the blocks).
    """
    groups: dict[tuple[object, object], list[Finding]] = {}
    for finding in findings:
        if finding.knob.startswith("weights.") and str(finding.candidate_value).startswith(ROUNDED):
            groups.setdefault((finding.candidate_value, finding.layers), []).append(finding)
    whole = [group for group in groups.values() if len(group) > 1]
    if not whole:
        return list(findings)
    gone = {id(finding) for group in whole for finding in group}
    explained = {name for group in whole for finding in group for name in _tensors(finding, tensor_of)}
    left = [finding for finding in findings if id(finding) not in gone and not _only_differs(finding, explained)]
    return [*(_one(group) for group in whole), *left]


def _tensors(finding: Finding, tensor_of: TensorOf) -> set[str]:
    """The checkpoint's tensors that a fit of a projection speaks of; without layers, those of all."""
    roles = roles_of_knob(finding.knob)
    return {
        name
        for (role, layer), name in tensor_of.items()
        if role in roles and (finding.layers is None or layer in finding.layers)
    }


def _only_differs(finding: Finding, explained: set[str]) -> bool:
    """Whether a finding says no more than that tensors are not the reference's, all of which are explained."""
    named = finding.evidence.get("tensors", [finding.site])
    return finding.knob == "weights" and "holds" not in finding.evidence and set(named) <= explained


def _one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    roles = [finding.knob.removeprefix("weights.") for finding in group]
    kind = str(first.candidate_value).removeprefix(ROUNDED)
    return dataclasses.replace(
        first, knob=KNOB, candidate_value=f"rounded to {kind}", confidence=min(item.confidence for item in group),
        evidence={**first.evidence, "projections": roles, "sites": [local_name(item.site) for item in group]},
        message=f"the weights of {', '.join(roles)} are the checkpoint's rounded to {kind}: a quantised model",
    )  # fmt: skip
