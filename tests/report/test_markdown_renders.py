"""The Markdown of every report, read by a CommonMark parser: tables are tables, code is code, and no foreign text becomes markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from sample import EVIL_REPORT, NOTHING, ONE_DEAD, REPORT

from parity_audit.report.markdown import render

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = [*sorted((ROOT / "reports" / "examples").glob("*/report.md")), ROOT / "reports" / "matrix.md"]
PARSER = MarkdownIt("commonmark").enable("table")


def kinds(text: str) -> list[str]:
    """The types of every token, with those inside of paragraphs and cells."""
    tokens = PARSER.parse(text)
    return [inner.type for token in tokens for inner in (token, *(token.children or ()))]


@pytest.mark.parametrize("report", [REPORT, ONE_DEAD, NOTHING, EVIL_REPORT], ids=["two", "dead", "nothing", "evil"])
def test_nothing_of_a_report_becomes_html_a_link_or_a_picture(report):
    assert {"html_inline", "html_block", "link_open", "image"}.isdisjoint(kinds(render(report)))


def test_tables_code_and_headings_are_read_as_such():
    found = kinds(render(REPORT))

    rules = [line for line in render(REPORT).splitlines() if line.startswith("|") and set(line) <= set("|-: ")]
    assert found.count("table_open") == len(rules) >= 2
    assert "fence" in found
    assert found.count("heading_open") >= 4


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_row_of_a_committed_table_has_as_many_cells_as_its_head(path):
    html = PARSER.render(path.read_text())
    tables = [table.partition("</table>")[0] for table in html.split("<table>")[1:]]

    assert tables
    for table in tables:
        rows = table.split("<tr>")[1:]
        assert {row.count("<td") for row in rows[1:]} == {rows[0].count("<th")}
        assert "|" not in rows[0]
