"""The report as Markdown, for an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parity_audit.core.report import Candidate, Finding, Patch, Report
from parity_audit.report.escape import code_span, fenced, markdown, plain
from parity_audit.report.evidence import evidence_lines
from parity_audit.report.numbers import layer_set, number, ratio, shown
from parity_audit.report.rows import before_after, layer_rows, not_tested, not_visible
from parity_audit.report.words import (
    DEPARTS,
    blind_line,
    divergence_line,
    headline,
    hook_rows,
    label,
    limit_text,
    proof_rows,
    right_reference_rows,
    scope_line,
    weights_line,
    where_found,
)


def render(report: Report, *, where: str = "") -> str:
    """The whole report; every foreign string is escaped or in code."""
    lines = [f"# {markdown(headline(report))}", ""]
    if report.candidates:
        rows = [(code_span(label(one)), one.verdict.value, markdown(one.why)) for one in report.candidates]
        lines += [*_table(("candidate", "verdict", "why"), rows), ""]
    if report.error:
        lines += [f"**{markdown(report.error.get('code', 'error'))}**: {markdown(report.error.get('message', ''))}", ""]
    lines += [*_context(report), ""]
    for candidate in report.candidates:
        lines += _candidate(candidate)
    lines += _list("Not tested in this run", not_tested(report))
    lines += [markdown(scope_line(report)), ""]
    if where:
        lines += [f"All numbers: {code_span(where)}", ""]
    return "\n".join(lines)


def _context(report: Report) -> list[str]:
    items = [("model", report.model), ("architecture", report.architecture)]
    items += [("weights", weights_line(report))] if report.weights else []
    for name, side in (("reference", report.reference), ("judge", report.judge)):
        if side is not None:
            items.append((name, f"{label(side)}, {side.dtype} on {side.device}"))
    return [f"- {name}: {code_span(text)}" for name, text in items if text]


def _candidate(candidate: Candidate) -> list[str]:
    lines = [f"## {markdown(label(candidate))}: {candidate.verdict.value}", ""]
    rows = [
        (code_span(row.place), code_span(row.site), number(row.delta.max_abs), number(row.delta.rel),
         ratio(row.delta.noise_ratio))
        for row in layer_rows(candidate)
    ]  # fmt: skip
    if rows:
        lines += [*_table(("part", "worst site", "max abs", "relative", "noise ratio"), rows), ""]
    first = divergence_line(candidate)
    if first:
        lines += [f"First divergence: {markdown(first)}", ""]
    for finding in candidate.findings:
        lines += _finding(finding)
    lines += _right_reference(candidate)
    for patch in candidate.patches:
        lines += _patch(patch)
    if candidate.logits is not None or candidate.patched is not None:
        titles, compared = before_after(candidate)
        lines += [*_table(titles, map(_escaped, compared)), ""]
    if candidate.proof:
        lines += _list("Proof on the reference's side", proof_rows(candidate.proof))
    lines += _list("Edited hooks", hook_rows(candidate))
    lines += _list("Warnings", [("warning", text) for text in candidate.warnings])
    lines += _list("Not visible in this backend", not_visible(candidate))
    lines += _list("Not tested", not_tested(candidate))
    blind = blind_line(candidate)
    limits = [(item.knob, limit_text(item)) for item in candidate.detection]
    return lines + _list("Smallest error this run could have seen", limits) + ([markdown(blind), ""] if blind else [])


def _finding(finding: Finding) -> list[str]:
    rows = [
        ("reference", code_span(shown(finding.reference_value))),
        ("candidate", code_span(shown(finding.candidate_value))),
        ("spec", code_span(shown(finding.spec_value))),
    ]
    lines = [f"### {code_span(finding.knob)}", "", markdown(where_found(finding, layer_set(finding.layers))) + ".", ""]
    lines += [*_table(("", "value"), rows), ""]
    departs = DEPARTS.get(finding.departs_from_spec, finding.departs_from_spec)
    lines += [f"{markdown(departs)}; confidence {finding.confidence:.2f}.", ""]
    return lines + [f"- {markdown(line)}" for line in evidence_lines(finding.evidence)] + [""]


def _right_reference(candidate: Candidate) -> list[str]:
    right = candidate.right_reference
    if right is None:
        return []
    lines = _list("The reference departs from the spec", right_reference_rows(right))
    return [*lines, fenced(right.code, "python"), ""] if right.code else lines


def _patch(patch: Patch) -> list[str]:
    fixes = ", ".join(code_span(knob) for knob in patch.fixes or (patch.knob,))
    code = "\n".join(plain(line) for line in patch.code.splitlines())
    lines = [f"Patch for {fixes} in {code_span(patch.backend)}:", "", fenced(code, "python"), ""]
    return [*lines, markdown(patch.note), ""] if patch.note else lines


def _escaped(row: Sequence[str]) -> list[str]:
    return [markdown(cell) for cell in row]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _list(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"**{title}**", "", *[f"- {code_span(name)}: {markdown(text)}" for name, text in rows], ""]
