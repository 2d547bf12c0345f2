"""Markdown, JSON, the published schema, and the files of a report directory."""

from __future__ import annotations

import html as stdlib_html
import json as stdlib_json
import math
import re
from collections import Counter
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from sample import EVIL_REPORT, NOTHING, ONE_DEAD, REPORT, logits

from parity_audit.core.errors import NotJudged, WorkerDied
from parity_audit.core.report import Candidate, Finding, Patch, Proof
from parity_audit.report import audit_page, html, json, markdown, notebook, terminal
from parity_audit.report.failure import failed_report
from parity_audit.report.files import write_report
from parity_audit.report.schema import report_schema, schema_text

ALL = {"mismatch": REPORT, "one-dead": ONE_DEAD, "nothing": NOTHING, "evil": EVIL_REPORT}
SCHEMA_FILE = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_report_json_satisfies_the_published_schema(report):
    schema = stdlib_json.loads(SCHEMA_FILE.read_text())

    jsonschema.validate(stdlib_json.loads(json.dumps(report)), schema)


def test_a_python_session_shows_a_report_in_a_line():
    one = ONE_DEAD.candidates[0]

    assert repr(one) == f"<Candidate {one.backend} {one.version}: {one.verdict.value}, findings: {len(one.findings)}>"
    assert (
        repr(ONE_DEAD) == f"<Report on {ONE_DEAD.model}: {list(ONE_DEAD.candidates)}, exit code {ONE_DEAD.exit_code}>"
    )


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
    assert len(widths) >= 2
    assert all(len(width) == 1 for width in widths)


def test_markdown_holds_no_bare_markup():
    text = markdown.render(EVIL_REPORT)

    assert "\\<b\\>" in text
    assert not re.search(r"(?<!\\)<b>", text)
    assert "\x1b" not in text


def test_markdown_has_values_code_and_before_after():
    text = markdown.render(REPORT)

    for says in (
        "- **candidate**: 14.9666",
        "```python\nmodel.cfg.attn_scale = 16.0",
        "| max \\|difference\\| | 0.323 | 4.65e-06 |",
    ):
        assert says in text


def words_of(text):
    """The words of a report without what only lays them out."""
    bare = re.sub(r"\\([\\`*_{}\[\]<>|#~])", r"\1", text)
    return re.findall(r"[^\s*|`│█─]+", re.sub(r"^(#+|-|\|[ |:-]+\|$)", " ", bare, flags=re.MULTILINE))


def drawn_as_html(report):
    inside = re.sub(r"<style>.*?</style>", "", html.render(report, where="report.json"), flags=re.DOTALL)
    return stdlib_html.unescape(re.sub(r"<[^>]*>", " ", inside))


def drawn_as_page(report):
    inside = re.sub(r"<(style|script|title)>.*?</\1>", "", audit_page.render(report), flags=re.DOTALL)
    return stdlib_html.unescape(re.sub(r"<[^>]*>", " ", inside)) + " report: report.json"


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    "draw",
    [lambda report: markdown.render(report, where="report.json"), drawn_as_html, drawn_as_page],
    ids=["md", "html", "page"],
)
def test_no_format_loses_a_word_that_the_text_has(report, draw):
    in_text = words_of(terminal.render(report, where="report.json", width=10_000))
    counted, shown = (
        Counter(word.strip(":") for word in in_text),
        Counter(word.strip(":") for word in words_of(draw(report))),
    )

    assert len(counted) > 30
    assert {word: count for word, count in (counted - shown).items() if word and not word.isspace()} == {}


FACTS = [field for kind in (Candidate, Finding, Patch, Proof) for field in fields(kind) if "str" in str(field.type)]


@pytest.mark.parametrize("field", FACTS, ids=lambda field: field.name)
def test_what_one_format_says_of_a_field_every_format_says(field):
    """Each text of a candidate is replaced by a mark: it is in all of the formats, or in none."""
    marked = _with_mark(REPORT, field.name)
    texts = (terminal.render(marked, width=10_000), markdown.render(marked), html.render(marked))

    assert len({"MARKED" in text for text in texts}) == 1


def _with_mark(report, name):
    """The report with `MARKED` as every text of this name in its first candidate."""
    plain = stdlib_json.loads(json.dumps(report))

    def mark(value):
        if isinstance(value, dict):
            return {
                key: "MARKED" if key == name and isinstance(item, str) else mark(item) for key, item in value.items()
            }
        return [mark(item) for item in value] if isinstance(value, list) else value

    plain["candidates"][0] = {**mark(plain["candidates"][0]), "verdict": plain["candidates"][0]["verdict"]}
    proof = plain["candidates"][0]["proof"]
    plain["candidates"][0]["proof"] = {**proof, "verdict": "parity"}
    plain["candidates"][0]["patched"]["verdict"] = "parity"
    return json.loads(stdlib_json.dumps(plain))


class Elements(HTMLParser):
    """Tags that a document opens and has not closed, and those that it has."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)
        assert not [value for name, value in attrs if name.startswith("on") or name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", ALL.values(), ids=ALL)
def test_html_is_one_closed_element_without_script_or_address(report):
    reader = Elements()
    reader.feed(html.render(report))

    assert reader.open == []
    assert reader.seen[:2] == ["div", "style"]
    assert not {"script", "img", "link", "b>"} & set(reader.seen)


def test_html_shows_foreign_text_and_does_not_obey_it():
    text = html.render(EVIL_REPORT)

    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "\x1b" not in text


def test_a_notebook_gets_the_html():
    assert not notebook.in_notebook()
    assert REPORT._repr_html_() == html.render(REPORT)


def test_html_opens_what_is_wrong_and_folds_what_is_right():
    text = html.render(REPORT)

    assert re.findall(r"<details( open)?><summary>.*?</summary>", text) == [" open", ""]


def test_a_directory_gets_every_format_and_no_part_is_left(tmp_path):
    path = write_report(REPORT, tmp_path / "new" / "out")

    assert json.loads(path.read_text()) == REPORT
    assert sorted(item.name for item in path.parent.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "report.txt",
    ]


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(NotJudged) as caught:
        write_report(REPORT, tmp_path / "file" / "out")
    assert (caught.value.code, caught.value.exit_code) == ("disk", 3)


def test_an_error_alone_makes_a_valid_report():
    report = failed_report("gemma-2-2b-it", WorkerDied("hf died", hint="look at the log"))

    jsonschema.validate(stdlib_json.loads(json.dumps(report)), report_schema())
    assert (report.exit_code, report.error["code"]) == (3, "worker-died")
