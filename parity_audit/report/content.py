"""The report of an audit as blocks that every format draws, from the headline to the scope of its verdict."""

from __future__ import annotations

from parity_audit.core.report import Candidate, Report
from parity_audit.report.blocks import BAD, BOLD, SPACE, Block, Pairs, Paragraph, heading, pairs, paragraph, styled
from parity_audit.report.candidate_content import candidate_content, style_of
from parity_audit.report.history_content import baseline_content
from parity_audit.report.numbers import seconds
from parity_audit.report.rows import not_tested
from parity_audit.report.words import headline, label, labels, release_lines, scope_line, weights_line

VERDICT_WIDTH = 12


def content(report: Report, *, where: str = "") -> list[Block]:
    """Return the whole report; `where` is the path of report.json, which the last block names."""
    return [*opening(report), *(block for _, blocks in candidates(report) for block in blocks), *closing(report, where)]


def opening(report: Report) -> list[Block]:
    """Return the headline, one verdict per candidate, the error if there is one, and what was compared."""
    blocks: list[Block] = [styled((headline(report), BOLD), level=1)]
    for one, name in zip(report.candidates, labels(report), strict=True):
        row = (one.verdict.value, f"{name}: {one.why}")
        blocks.append(Pairs(rows=(row,), width=VERDICT_WIDTH, style=style_of(one.verdict)))
    if report.error:
        blocks += [SPACE, *error_blocks(report.error)]
    return [*blocks, SPACE, context(report)]


def candidates(report: Report) -> list[tuple[Candidate, list[Block]]]:
    """Return every candidate with its blocks; the title comes first, after an empty line."""
    named = zip(report.candidates, labels(report), strict=True)
    return [(candidate, candidate_content(candidate, name)) for candidate, name in named]


def closing(report: Report, where: str) -> list[Block]:
    """Return the comparison with the baseline, what the run did not test, the scope of the verdicts, and the path."""
    gaps = not_tested(report)
    blocks = baseline_content(report.baseline)
    blocks += [SPACE, heading("Not tested in this run"), pairs(gaps)] if gaps else []
    blocks += [SPACE, paragraph(scope_line(report))]
    return [*blocks, Paragraph(text=f"report: {where}", wrap=False)] if where else blocks


def error_blocks(error: dict[str, object]) -> list[Block]:
    """Return the error that ended a run, with its place, expected and found values and hint where they are known."""
    line = styled((f"error[{error.get('code', 'error')}]: {error.get('message', '')}", BAD))
    known = [(name, str(error[name])) for name in ("where", "expected", "found", "hint") if error.get(name)]
    return [line, pairs(known)] if known else [line]


def context(report: Report) -> Pairs:
    """Return the model, weights, reference, judge, releases, probes and total time."""
    rows = [("model", report.model)]
    if report.architecture:
        rows.append(("architecture", report.architecture))
    if report.weights:
        rows.append(("weights", weights_line(report)))
    for name, side in (("reference", report.reference), ("judge", report.judge)):
        if side is not None:
            rows.append((name, f"{label(side)}, {side.dtype} on {side.device}"))
            rows += [("self-check", line) for line in side.self_check]
    rows += [("releases", line) for line in release_lines(report)]
    if report.probes:
        rows.append(("probes", ", ".join(_probe(probe) for probe in report.probes)))
    if report.seconds:
        rows.append(("time", seconds(report.seconds.get("total", sum(report.seconds.values())))))
    return pairs(rows)


def _probe(probe: dict[str, object]) -> str:
    shape = probe.get("shape")
    sizes = "x".join(str(size) for size in shape) if isinstance(shape, (list, tuple)) else "?"
    return f"{probe.get('name')} [{sizes}]"
