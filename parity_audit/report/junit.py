"""JUnit XML of a gate: one test case per case, valid for Ant's schema and for that of Jenkins.

A failure is a `failure` of type `mismatch`; what could not be judged is an `error` of type `error` or `infra`; what was not
tested is `skipped`. Neither schema has a place for a flake, which is a case that passed: every case's own status is a
property of its suite as well, and flakes are listed in the suite's output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import groupby
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from parity_audit.core.gate import Case, GateReport, Status
from parity_audit.report.escape import one_line, plain

ELEMENTS = {
    Status.FAILED: ("failure", "mismatch"),
    Status.ERROR: ("error", "error"),
    Status.INFRA: ("error", "infra"),
    Status.NOT_TESTED: ("skipped", ""),
}
NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold."""
UNKNOWN_HOST = "localhost"
"""The schema asks for this word where the host is not known."""


def render(gate: GateReport) -> str:
    """The document: one suite per group."""
    root = Element("testsuites")
    ordered = sorted(gate.cases, key=lambda case: case.group)
    for number, (group, cases) in enumerate(groupby(ordered, key=lambda case: case.group)):
        root.append(_suite(gate, number, group, list(cases)))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(gate: GateReport, number: int, group: str, cases: Sequence[Case]) -> Element:
    kinds = [ELEMENTS.get(case.status, ("",))[0] for case in cases]
    suite = Element(
        "testsuite", name=_text(group), package="parity-audit", id=str(number), hostname=UNKNOWN_HOST,
        timestamp=gate.started or datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S"),
        tests=str(len(cases)), failures=str(kinds.count("failure")), errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")), time=_seconds(sum(case.seconds for case in cases)),
    )  # fmt: skip
    properties = SubElement(suite, "properties")
    for case in cases:
        SubElement(properties, "property", name=f"status of {_text(case.name)}", value=case.status.value)
        suite.append(_case(group, case))
    flakes = (f"flake: {case.name}: {case.message}" for case in cases if case.status is Status.FLAKE)
    SubElement(suite, "system-out").text = _lines("\n".join(flakes))
    SubElement(suite, "system-err")
    return suite


def _case(group: str, case: Case) -> Element:
    made = Element("testcase", name=_text(case.name), classname=_text(group), time=_seconds(case.seconds))
    if case.status in ELEMENTS:
        tag, kind = ELEMENTS[case.status]
        inner = SubElement(made, tag, message=_text(case.message))
        if kind:
            inner.set("type", kind)
        place = f"{case.file}:{case.line}" if case.file else ""
        inner.text = _lines("\n".join(filter(None, (place, case.details)))) or None
    return made


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _text(text: str) -> str:
    """One line that XML can hold."""
    return NOT_XML.sub("?", one_line(text))


def _lines(text: str) -> str:
    return NOT_XML.sub("?", "\n".join(plain(line) for line in text.splitlines()))
