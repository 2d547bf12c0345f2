"""Report weights rounded to one format as one finding, a quantised model, not as one wrong tensor per projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parity_audit.core.report import Finding
from parity_audit.core.sites import local_name

KNOB = "weights.format"
ROUNDED = "the checkpoint's rounded to "


def quantised_as_one(findings: Sequence[Finding]) -> list[Finding]:
    """Return one candidate's findings, with projections of the same layers rounded to the same format joined into one."""
    groups: dict[tuple[object, object], list[Finding]] = {}
    for finding in findings:
        if finding.knob.startswith("weights.") and str(finding.candidate_value).startswith(ROUNDED):
            groups.setdefault((finding.candidate_value, finding.layers), []).append(finding)
    whole = [group for group in groups.values() if len(group) > 1]
    gone = {id(finding) for group in whole for finding in group}
    return [*(_one(group) for group in whole), *(finding for finding in findings if id(finding) not in gone)]


def _one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    roles = [finding.knob.removeprefix("weights.") for finding in group]
    tensors = [name for finding in group for name in finding.evidence.get("tensors", ())]
    kind = str(first.candidate_value).removeprefix(ROUNDED)
    return dataclasses.replace(
        first, knob=KNOB, candidate_value=f"rounded to {kind}", confidence=min(item.confidence for item in group),
        evidence={**first.evidence, "tensors": tensors, "projections": roles, "sites": [local_name(item.site) for item in group]},
        message=f"the weights of {', '.join(roles)} are the checkpoint's rounded to {kind}: a quantised model",
    )  # fmt: skip
