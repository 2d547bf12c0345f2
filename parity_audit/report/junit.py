"""A gate as JUnit XML: one `testcase` per case, valid under both Ant's and Jenkins' schema.

A case that failed is a `failure` of type `mismatch`; one that could not be judged is an `error` of type `error` or `infra`;
one that was not tested is `skipped`. Neither schema has an element for a flake, which counts as passed. Therefore the status
of every case is also a property of its suite, and flakes are listed in the suite's output.
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
"""Characters that XML 1.0 cannot contain."""
UNKNOWN_HOST = "localhost"
"""The host name that the schema requires if the host is not known."""


def render(gate: GateReport) -> str:
    """Return the document, with one suite per group of cases."""
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
    """Return the text as one line that XML can contain."""
    return NOT_XML.sub("?", one_line(text))


def _lines(text: str) -> str:
    return NOT_XML.sub("?", "\n".join(plain(line) for line in text.splitlines()))
