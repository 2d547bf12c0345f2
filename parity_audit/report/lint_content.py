"""A lint report as blocks for the terminal: one row per model and constant that departs from the spec."""

from __future__ import annotations

from collections import Counter

from parity_audit.core.lint_report import LintReport
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, styled
from parity_audit.report.numbers import seconds, shown

SHORT = 48
"""The most characters of a value in the table; the JSON has the whole value."""


def headline(report: LintReport) -> str:
    """Return in one line how many constants were compared, and how many of them depart in how many models."""
    if not report.constants:
        return f"Nothing was compared: {report.backend} {report.version} gave no config that a spec has"
    names = {one.model for one in report.departures}
    held = f"{report.constants} constants of {len(report.compared)} names in {report.backend} {report.version}"
    return f"{held}: {len(report.departures)} depart, in {len(names)} names" if names else f"{held}: none departs"


def lint_content(report: LintReport, *, where: str = "") -> list[Block]:
    """Return the whole report."""
    blocks: list[Block] = [styled((headline(report), BOLD), level=1)]
    if report.departures:
        rows = [(one.model, one.knob, one.field, _value(one.engine), _value(one.spec)) for one in report.departures]
        blocks += [SPACE, columns(("model", "knob", "field", report.backend, "spec"), rows)]
    why = Counter(report.without.values())
    blocks += [SPACE, heading("Not compared"), pairs((f"{count} names", text) for text, count in why.most_common())]
    about = [("note", report.note), ("time", seconds(report.seconds)), *([("files", where)] if where else [])]
    return [*blocks, SPACE, pairs((name, text) for name, text in about if text)]


def _value(value: object) -> str:
    text = shown(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."
