"""The report for a terminal: verdict and reason first, then the evidence, at a fixed width, with or without colour."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

from parity_audit.core.report import Report
from parity_audit.report.escape import ascii_text, plain
from parity_audit.report.numbers import seconds
from parity_audit.report.parts import Part, hanging, heading, pairs, paragraph
from parity_audit.report.rows import not_tested
from parity_audit.report.terminal_candidate import candidate_parts, style_of
from parity_audit.report.words import headline, label, scope_line, weights_line

WIDTH = 80


def render(
    report: Report, *, where: str = "", width: int = WIDTH, colour: bool = False, ascii_only: bool = False
) -> str:
    """The whole report as text.

    Args:
        where: the path of report.json, named at the end.
        colour: with ANSI colours; without them nothing is lost.
        ascii_only: for an output that cannot encode the bars.
    """
    stream = StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, markup=False, highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for part in _parts(report, where, width):
        console.print(part, soft_wrap=isinstance(part, str))
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
    return ascii_text(text) if ascii_only else text


def _parts(report: Report, where: str, width: int) -> list[Part]:
    parts: list[Part] = [Text(plain(headline(report)), style="bold")]
    parts += _summary(report)
    if report.error:
        parts += ["", *_error(report.error)]
    parts += ["", _context(report)]
    for candidate in report.candidates:
        parts += candidate_parts(candidate, width)
    gaps = not_tested(report)
    if gaps:
        parts += ["", heading("Not tested in this run"), pairs(gaps)]
    parts += ["", paragraph(scope_line(report))]
    if where:
        parts.append(f"report: {plain(where)}")
    return parts


def _summary(report: Report) -> list[Part]:
    """One line per candidate: its verdict and why."""
    rows = [
        (Text(one.verdict.value, style=style_of(one.verdict)), Text(plain(f"{label(one)}: {one.why}"), overflow="fold"))
        for one in report.candidates
    ]
    return [hanging(rows, width=12)] if rows else []


def _error(error: dict[str, object]) -> list[Part]:
    lines: list[Part] = [Text(plain(f"error[{error.get('code', 'error')}]: {error.get('message', '')}"), style="red")]
    known = [(name, plain(error[name])) for name in ("where", "expected", "found", "hint") if error.get(name)]
    return [*lines, pairs(known)] if known else lines


def _context(report: Report) -> Part:
    rows = [("model", report.model)]
    if report.architecture:
        rows.append(("architecture", report.architecture))
    if report.weights:
        rows.append(("weights", weights_line(report)))
    for name, side in (("reference", report.reference), ("judge", report.judge)):
        if side is not None:
            rows.append((name, f"{label(side)}, {side.dtype} on {side.device}"))
            rows += [("self-check", line) for line in side.self_check]
    if report.probes:
        rows.append(("probes", ", ".join(_probe(probe) for probe in report.probes)))
    if report.seconds:
        rows.append(("time", seconds(report.seconds.get("total", sum(report.seconds.values())))))
    return pairs(rows)


def _probe(probe: dict[str, object]) -> str:
    shape = probe.get("shape")
    sizes = "x".join(str(size) for size in shape) if isinstance(shape, (list, tuple)) else "?"
    return f"{probe.get('name')} [{sizes}]"


__all__ = ["WIDTH", "render"]
