"""A bisection's report as blocks for the terminal: the releases that changed a fault, then every release that was run."""

from __future__ import annotations

from parity_audit.core.bisection import BisectReport, Change, Observation
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, styled
from parity_audit.report.numbers import seconds


def headline(report: BisectReport) -> str:
    """Return all changes in one line."""
    return "; ".join(_said(report.backend, one) for one in report.changes) or "no change was found"


def _said(backend: str, one: Change) -> str:
    """Describe one change: `transformer_lens 2.3.1 of 2024-08-13 repaired attention.scale 14.9666 (2.3.0 still has it)`."""
    when = f"{one.release} of {one.date}" if one.date else one.release
    unknown = f" (or one of {', '.join(one.unknown)}, which could not be judged)" if one.unknown else ""
    still = f"{one.before} still has it" if one.kind == "repaired" else f"{one.before} is without it"
    instead = f"; it shows {one.otherwise} instead, which departs too" if one.otherwise else ""
    return f"{backend} {when}{unknown} {one.kind} {one.fault} {one.value} ({still}{instead})"


def bisect_content(report: BisectReport, *, where: str = "") -> list[Block]:
    """Return the whole report; `where` is the path of its files."""
    blocks: list[Block] = [styled((headline(report), BOLD), level=1), SPACE, heading("Releases that were run")]
    rows = [(seen.version, seen.date, _state(seen), seconds(seen.seconds)) for seen in report.observations]
    about = [
        ("model", report.model), ("reference", report.reference), ("ordered by", report.order),
        ("probes", ", ".join(report.probes) or "all"), ("time", seconds(report.seconds)),
    ]  # fmt: skip
    return [
        *blocks, columns(("release", "date", "what it shows", "took"), rows), SPACE,
        pairs([*about, *([("files", where)] if where else [])]),
    ]  # fmt: skip


def _state(seen: Observation) -> str:
    if seen.skipped:
        return f"skipped: {seen.skipped}"
    faults = ", ".join(f"{knob} {value}" for knob, value in seen.faults.items())
    return f"{seen.verdict}: {faults}" if faults else seen.verdict
