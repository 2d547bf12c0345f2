"""The message of a failed `assert_parity`: for each candidate the layer, component, constant and patch."""

from __future__ import annotations

from collections.abc import Iterator

from parity_audit.core.report import Candidate, Finding, Report
from parity_audit.report.cases import in_one_line
from parity_audit.report.escape import plain
from parity_audit.report.numbers import shown
from parity_audit.report.words import DEPARTS, headline, labels


def failure(report: Report) -> str:
    """Return the headline, then every candidate's verdict, first divergence, findings, patches and error."""
    lines = [headline(report)]
    for one, name in zip(report.candidates, labels(report), strict=True):
        lines += [f"{name}: {one.verdict.value}: {one.why}", *_where(one)]
    return "\n".join(plain(line) for text in lines for line in text.splitlines())


def _where(one: Candidate) -> Iterator[str]:
    if one.first_divergence:
        layer = one.first_divergence.get("layer")
        place = "outside the blocks" if layer is None else f"layer {layer}"
        yield f"  first divergence: {place}, {one.first_divergence.get('site')}"
    for finding in one.findings:
        yield from _finding(finding)
    for patch in one.patches:
        yield f"  patch for {patch.knob}:"
        yield from (f"    {line}" for line in patch.code.splitlines())
    if one.error:
        yield from (f"  {key}: {one.error[key]}" for key in ("code", "where", "found", "hint") if one.error.get(key))


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {in_one_line(finding)}, spec {shown(finding.spec_value)}"
    yield f"    {DEPARTS.get(finding.departs_from_spec, finding.departs_from_spec)}"
