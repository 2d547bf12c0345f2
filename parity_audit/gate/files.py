"""Write the files of a gate: JSON, JUnit, SARIF and a Markdown summary, also into the summary of a GitHub workflow run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from parity_audit.core.errors import ELSEWHERE, refusals_of_the_disk
from parity_audit.core.gate import GateReport
from parity_audit.core.jsonio import dumps
from parity_audit.report import junit, markdown, sarif
from parity_audit.report.gate_content import gate_content

SUMMARY_ENV = "GITHUB_STEP_SUMMARY"
SUMMARY = "summary.md"


def summary(gate: GateReport) -> str:
    """Return the result of a gate as Markdown."""
    return markdown.written(gate_content(gate))


FILES: dict[str, Callable[[GateReport], str]] = {
    "gate.json": lambda gate: dumps(gate, indent=1) + "\n",
    "junit.xml": junit.render,
    "results.sarif": sarif.render,
    SUMMARY: summary,
}


def write_gate(gate: GateReport, out: Path) -> None:
    """Write every file below `out`, and append the summary to that of the workflow run if there is one.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    with refusals_of_the_disk("write what the gate found", out, ELSEWHERE):
        out.mkdir(parents=True, exist_ok=True)
        for name, render in FILES.items():
            (out / name).write_text(render(gate), encoding="utf-8")
        if os.environ.get(SUMMARY_ENV):
            with open(os.environ[SUMMARY_ENV], "a", encoding="utf-8") as shown:
                shown.write(summary(gate) + "\n")
