"""A gate's cases as annotations of a pull request: GitHub workflow commands on stdout with file, line and message."""

from __future__ import annotations

from parity_audit.core.gate import Case, GateReport, Status
from parity_audit.report.escape import plain

LEVELS = {
    Status.FAILED: "error",
    Status.ERROR: "error",
    Status.INFRA: "error",
    Status.FLAKE: "warning",
}


def render(gate: GateReport) -> str:
    """Return one line for each case that failed, could not be judged, or passed only on a repeated run."""
    return "".join(_line(case) + "\n" for case in gate.cases if case.status in LEVELS)


def _line(case: Case) -> str:
    title = f"{case.status.value}: {case.rule}" if case.rule else case.status.value
    found = {"file": case.file, "line": str(case.line) if case.file and case.line else "", "title": title}
    properties = ",".join(f"{key}={_property(value)}" for key, value in found.items() if value)
    return f"::{LEVELS[case.status]} {properties}::{_data(f'{case.group}: {case.name}: {case.message}')}"


def _data(text: str) -> str:
    """Escape `%`, carriage returns and line feeds, which GitHub's runner would interpret in a message."""
    lines = "\n".join(plain(line) for line in text.splitlines())
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property like a message, and also the colon and the comma, which separate properties."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
