"""A gate as SARIF 2.1.0, for code scanning: one rule per knob or check, one result per case, with the line to repair.

`kind` is `fail`, `pass`, `notApplicable` (not tested) or `open` (not judged); `properties.status` is the status of the case.
Cases that could not be judged, and cases that passed only when they were repeated, are also notifications of the run.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from parity_audit.core.errors import EXIT_NOT_JUDGED
from parity_audit.core.gate import UNJUDGED, Case, GateReport, Status
from parity_audit.core.version import __version__
from parity_audit.report.escape import plain

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
KINDS = {
    Status.PASSED: "pass",
    Status.FLAKE: "pass",
    Status.FAILED: "fail",
    Status.ERROR: "open",
    Status.INFRA: "open",
    Status.NOT_TESTED: "notApplicable",
}
NO_RULE = "parity"


def render(gate: GateReport) -> str:
    """Return the SARIF log, with one run."""
    rules = sorted({case.rule or NO_RULE for case in gate.cases})
    run = {
        "tool": {
            "driver": {"name": "parity-audit", "semanticVersion": __version__, "rules": [_rule(name) for name in rules]}
        },
        "invocations": [_invocation(gate)],
        "results": [_result(case, rules) for case in gate.cases],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"


def _rule(name: str) -> dict[str, Any]:
    return {"id": plain(name), "shortDescription": {"text": plain(name)}}


def _invocation(gate: GateReport) -> dict[str, Any]:
    """Return the invocation; it counts as successful if everything could be judged, whatever the verdict."""
    levels = {Status.FLAKE: "warning", **dict.fromkeys(UNJUDGED, "error")}
    notes = [
        {"level": levels[case.status], "message": _message(f"{case.status.value}: {_said(case)}")}
        for case in gate.cases if case.status in levels
    ]  # fmt: skip
    return {
        "executionSuccessful": gate.exit_code != EXIT_NOT_JUDGED,
        "exitCode": gate.exit_code,
        "toolExecutionNotifications": notes,
    }


def _result(case: Case, rules: list[str]) -> dict[str, Any]:
    rule = case.rule or NO_RULE
    return {
        "ruleId": plain(rule),
        "ruleIndex": rules.index(rule),
        "kind": KINDS[case.status],
        "level": "error" if case.status is Status.FAILED else "none",
        "message": _message("\n\n".join(filter(None, (_said(case), case.details)))),
        "locations": [_location(case)],
        "properties": {"status": case.status.value},
    }


def _location(case: Case) -> dict[str, Any]:
    """Return the name of the case, and its file and line if they are known."""
    place: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": plain(f"{case.group}: {case.name}")}]}
    if case.file:
        place["physicalLocation"] = {
            "artifactLocation": {"uri": quote(case.file)}, "region": {"startLine": max(case.line, 1)}
        }  # fmt: skip
    return place


def _said(case: Case) -> str:
    return f"{case.group}: {case.name}: {case.message}" if case.message else f"{case.group}: {case.name}"


def _message(text: str) -> dict[str, str]:
    return {"text": "\n".join(plain(line) for line in text.splitlines())}
