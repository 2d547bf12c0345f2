"""The report as Markdown, for pull requests and job summaries."""

from __future__ import annotations

from parity_audit.core.report import Candidate, Report
from parity_audit.report import lines


def to_markdown(report: Report) -> str:
    """The whole report; foreign text is escaped."""
    parts = [f"# Parity audit of {_escape(report.model)}", ""]
    if not any(map(lines.is_judged, report.candidates)):
        parts += ["**Nothing was judged.**", ""]
    reference = report.reference
    if reference is not None:
        parts.append(f"Reference: `{reference.backend}` {reference.version}, {reference.dtype} on {reference.device}.")
        parts += [f"- {_escape(note)}" for note in reference.self_check]
    for candidate in report.candidates:
        parts += ["", *_candidate(candidate)]
    parts += ["", f"Exit code {report.exit_code}.", ""]
    return "\n".join(parts)


def _candidate(candidate: Candidate) -> list[str]:
    parts = [
        f"## {candidate.verdict.value.upper()}: {_escape(lines.name_of(candidate))}",
        "",
        _escape(candidate.why),
        "",
    ]
    parts += [f"- {_escape(warning)}" for warning in candidate.warnings]
    if candidate.sites:
        parts += ["| site | max abs | noise ratio | introduced |", "|---|--:|--:|--:|"]
        parts += [
            f"| `{delta.site}` | {lines.number(delta.max_abs)} | {lines.ratio(delta.noise_ratio)} "
            f"| {lines.ratio(delta.introduced_ratio)} |"
            for delta in lines.table_sites(candidate)
        ]
        parts += ["", _escape(lines.logits_line(candidate.logits))]
    for finding in candidate.findings:
        head, *rest = lines.finding_lines(finding)
        parts += ["", f"**{_escape(head)}**", *(f"- {_escape(text.strip())}" for text in rest)]
    for patch in candidate.patches:
        parts += ["", f"Patch for {', '.join(patch.fixes)}. {_escape(patch.note)}", "", "```python", patch.code, "```"]
    after = lines.patched_line(candidate)
    if after:
        parts += ["", _escape(after)]
    missing = lines.gaps(candidate.not_tested, candidate.not_visible)
    if missing:
        parts += ["", "Not tested:", *(f"- {_escape(text)}" for text in missing)]
    return parts


def _escape(text: str) -> str:
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}") if char != "<" else text.replace("<", "&lt;")
    return text
