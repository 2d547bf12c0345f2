"""Markdown, JSON, the published schema, and the files of a report directory."""

from __future__ import annotations

import json as stdlib_json
import math
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from sample import EVIL_REPORT, NOTHING, ONE_DEAD, REPORT, logits

from parity_audit.core.errors import NotJudged, WorkerDied
from parity_audit.report import json, markdown
from parity_audit.report.failure import failed_report
from parity_audit.report.files import write_report
from parity_audit.report.schema import report_schema, schema_text

ALL = {"mismatch": REPORT, "one-dead": ONE_DEAD, "nothing": NOTHING, "evil": EVIL_REPORT}
SCHEMA_FILE = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_report_json_satisfies_the_published_schema(report):
    schema = stdlib_json.loads(SCHEMA_FILE.read_text())

    jsonschema.validate(stdlib_json.loads(json.dumps(report)), schema)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: plain.pop("candidates"),
        lambda plain: plain.update(surprise=1),
        lambda plain: plain["candidates"][0].update(verdict="fine"),
        lambda plain: plain["candidates"][0]["logits"].update(max_abs="0.1"),
        lambda plain: plain.update(schema_version=2),
    ],
)
def test_the_schema_refuses_what_is_not_a_report(spoil):
    plain = stdlib_json.loads(json.dumps(REPORT))
    spoil(plain)

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plain, report_schema())


def test_the_schema_itself_is_valid_and_published():
    jsonschema.Draft202012Validator.check_schema(report_schema())
    assert SCHEMA_FILE.read_text() == schema_text(), (
        "run python -m parity_audit.report.schema > docs/report.schema.json"
    )


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_json_and_back_is_the_same_report(report):
    assert json.loads(json.dumps(report)) == report


def test_another_schema_version_is_refused():
    with pytest.raises(ValueError, match="schema_version is 2"):
        json.loads(json.dumps(replace(REPORT, schema_version=2)))


def test_nan_never_reaches_json():
    broken = replace(REPORT.candidates[0], logits=logits(math.nan, 1.0))

    with pytest.raises(ValueError, match="JSON"):
        json.dumps(replace(REPORT, candidates=(broken,)))


@pytest.mark.parametrize("report", [NOTHING, ONE_DEAD], ids=["nothing", "one-dead"])
def test_markdown_of_exit_3_says_first_that_nothing_was_judged(report):
    assert markdown.render(report).startswith("# Nothing was judged")


def test_markdown_tables_are_rectangular_whatever_the_text():
    tables = [[]]
    for line in markdown.render(EVIL_REPORT).splitlines():
        tables = [*tables[:-1], [*tables[-1], line]] if line.startswith("|") else [*tables, []]

    widths = [{len(re.findall(r"(?<!\\)\|", line)) for line in table} for table in tables if table]
    assert len(widths) >= 4
    assert all(len(width) == 1 for width in widths)


def test_markdown_outside_code_holds_no_bare_markup():
    text = re.sub(r"(`+)(?:.*?)\1", "", markdown.render(EVIL_REPORT))

    assert "<b>" in markdown.render(EVIL_REPORT)
    assert not re.search(r"(?<!\\)<b>", text)
    assert "\x1b" not in text


def test_markdown_has_values_code_and_before_after():
    text = markdown.render(REPORT)

    for says in ("`14.9666`", "```python\nmodel.cfg.attn_scale = 16.0", "| max \\|difference\\| | 0.323 | 4.65e-06 |"):
        assert says in text


def test_a_directory_gets_three_files_and_no_part_is_left(tmp_path):
    path = write_report(REPORT, tmp_path / "new" / "out")

    assert json.loads(path.read_text()) == REPORT
    assert sorted(item.name for item in path.parent.iterdir()) == ["report.json", "report.md", "report.txt"]


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(NotJudged) as caught:
        write_report(REPORT, tmp_path / "file" / "out")
    assert (caught.value.code, caught.value.exit_code) == ("disk", 3)


def test_an_error_alone_makes_a_valid_report():
    report = failed_report("gemma-2-2b-it", WorkerDied("hf died", hint="look at the log"))

    jsonschema.validate(stdlib_json.loads(json.dumps(report)), report_schema())
    assert (report.exit_code, report.error["code"]) == (3, "worker-died")
