"""JUnit and SARIF against the public schemas, for a report with every kind of result, and for text that tries to break out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from report.sample import EVIL, EVIL_REPORT, NOTHING, ONE_DEAD, REPORT

from parity_audit.core.gate import Case, GateReport, Status, exit_code_of_cases, with_error_if_nothing_compared
from parity_audit.core.report import Finding, Verdict
from parity_audit.report import annotations, junit, markdown, sarif
from parity_audit.report.cases import gate_of, in_one_line, status_of_error
from parity_audit.report.gate_content import gate_content, headline

SCHEMAS = Path(__file__).parent / "schemas"


def case(status, **more):
    return Case(
        group="google/gemma-2-2b-it", name=f"a {status.value} one", status=status, message=f"says {EVIL}", **more
    )


def gate(*cases):
    return GateReport(title="all", cases=cases, started="2026-11-22T09:00:00", exit_code=exit_code_of_cases(cases))


EVERY = gate(*(case(status, file="model_specs/a b.yaml", line=7, rule="norm.eps") for status in Status))
GATES = {
    "every status": EVERY,
    "a report": gate_of(REPORT),
    "one that died": gate_of(ONE_DEAD),
    "an error": gate_of(NOTHING),
    "foreign text": gate_of(EVIL_REPORT),
    "nothing": gate(*with_error_if_nothing_compared(())),
    "text that XML cannot hold": gate(Case(group=EVIL, name="\x00\ud800]]>", status=Status.FAILED, details="\x0b<a>&")),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("schema", ["junit-ant.xsd", "junit-jenkins.xsd"])
def test_junit_is_valid(name, schema):
    xmlschema.XMLSchema(str(SCHEMAS / schema)).validate(ElementTree.fromstring(junit.render(GATES[name])))


def test_the_xml_schemas_can_refuse():
    broken = ElementTree.fromstring(junit.render(EVERY).replace("<failure", "<oops").replace("</failure", "</oops"))
    for schema in ("junit-ant.xsd", "junit-jenkins.xsd"):
        assert not xmlschema.XMLSchema(str(SCHEMAS / schema)).is_valid(broken)


def test_a_hook_is_told_in_words_and_not_by_two_names():
    """The value that a hook should show and the one that it shows may have the same name."""
    hook = Finding(
        knob="ln1.hook_normalized", kind="hook", layers=None, site="blocks.0.ln1.hook_normalized", reference_value="ln1.out",
        candidate_value="ln1.out", message="it shows ln1.out, where its name says the norm's input over its scale",
    )  # fmt: skip
    assert in_one_line(hook) == f"ln1.hook_normalized everywhere, seen at blocks.0.ln1.hook_normalized: {hook.message}"
    assert in_one_line(replace(hook, kind="constant")).endswith(": reference ln1.out, candidate ln1.out")


def sarif_validator():
    schema = json.loads((SCHEMAS / "sarif-schema-2.1.0.json").read_text())
    return jsonschema.Draft4Validator(schema, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("name", GATES)
def test_sarif_is_valid(name):
    sarif_validator().validate(json.loads(sarif.render(GATES[name])))


def test_the_json_schema_can_refuse():
    log = json.loads(sarif.render(EVERY))
    log["runs"][0]["results"][0]["kind"] = "wonderful"
    assert not sarif_validator().is_valid(log)


def test_each_status_is_told_apart_in_junit():
    suite = ElementTree.fromstring(junit.render(EVERY)).find("testsuite")
    shown = {item.get("name"): [(inner.tag, inner.get("type")) for inner in item] for item in suite.iter("testcase")}

    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "6",
        "1",
        "2",
        "1",
    )
    assert shown == {
        "a passed one": [], "a flake one": [], "a failed one": [("failure", "mismatch")],
        "a error one": [("error", "error")], "a infra one": [("error", "infra")], "a not tested one": [("skipped", None)],
    }  # fmt: skip
    assert {item.get("value") for item in suite.iter("property")} == {status.value for status in Status}
    assert "flake: a flake one" in suite.findtext("system-out")


def test_each_status_is_told_apart_in_sarif():
    (run,) = json.loads(sarif.render(EVERY))["runs"]

    assert {item["properties"]["status"]: (item["kind"], item["level"]) for item in run["results"]} == {
        "passed": ("pass", "none"), "flake": ("pass", "none"), "failed": ("fail", "error"), "error": ("open", "none"),
        "infra": ("open", "none"), "not tested": ("notApplicable", "none"),
    }  # fmt: skip
    assert run["results"][0]["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "model_specs/a%20b.yaml"}, "region": {"startLine": 7}
    }  # fmt: skip
    assert [note["level"] for note in run["invocations"][0]["toolExecutionNotifications"]] == [
        "error",
        "error",
        "warning",
    ]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_a_mismatch_is_one_failure_per_finding_with_its_patch():
    found = [one for one in gate_of(REPORT).cases if one.status is Status.FAILED]

    assert [one.rule for one in found] == ["attention.scale", "attention.softcap"]
    assert "reference 16, candidate 14.9666" in found[0].message
    assert "attn_scale = 16.0" in found[0].details


def test_annotations_name_the_file_the_line_and_the_knob():
    lines = annotations.render(EVERY).splitlines()

    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "::error", "::warning"]
    assert lines[0].startswith(
        "::error file=model_specs/a b.yaml,line=7,title=failed%3A norm.eps::google/gemma-2-2b-it: "
    )
    one = annotations.render(
        gate(
            case(Status.FAILED, file="a,b:c.yaml", line=1),
            Case(group="g", name="n", status=Status.ERROR, message="50%\nmore"),
        )
    )
    assert one.splitlines()[0].startswith("::error file=a%2Cb%3Ac.yaml,line=1,")
    assert one.splitlines()[1].endswith("::g: n: 50%25%0Amore")


def test_markdown_of_a_gate_shows_foreign_text_as_text():
    text = markdown.written(gate_content(EVERY))

    assert text.startswith(
        "# Not everything could be judged: 1 passed, 1 failed, 1 error, 1 infra, 1 flake, 1 not tested"
    )
    assert "\\<b\\>" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 3),
        ((Status.NOT_TESTED,), 3),
        ((Status.PASSED,), 0),
        ((Status.FLAKE, Status.NOT_TESTED), 0),
        ((Status.PASSED, Status.FAILED), 1),
        ((Status.FAILED, Status.INFRA), 3),
        ((Status.PASSED, Status.ERROR), 3),
    ],
)
def test_exit_codes(statuses, code):
    cases = tuple(map(case, statuses))
    assert exit_code_of_cases(cases) == code
    assert exit_code_of_cases(with_error_if_nothing_compared(cases)) == code
    assert headline(gate(*cases)).startswith({0: "Passed", 1: "Failed", 3: "Not everything"}[code])


def test_a_report_in_which_nobody_was_judged_is_no_pass():
    given = REPORT
    one = replace(
        given.candidates[0], verdict=Verdict.ERROR, findings=(), error={"code": "cannot-run", "message": "no"}
    )
    made = gate_of(replace(given, candidates=(one,), not_tested=()))

    assert made.exit_code == 3
    assert [one.message for one in made.cases if one.status is Status.ERROR] == ["nothing was compared"]


def test_errors_of_the_machine_are_told_from_those_of_a_program():
    assert status_of_error("timeout") is Status.INFRA
    assert status_of_error("backend-failed") is Status.ERROR
    assert status_of_error("cannot-run") is Status.NOT_TESTED
