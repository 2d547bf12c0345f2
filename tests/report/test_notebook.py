"""A cell that runs a long call and shows its report: one finished bar, the HTML, whole files, and nothing that libraries print."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbconvert.preprocessors import ExecutePreprocessor
from sample import REPORT

from parity_audit.report import html, json, markdown, terminal

CELL = """
import sys, warnings
from pathlib import Path
from parity_audit.report import json
from parity_audit.report.files import write_report
from parity_audit.report.notebook import with_bar

@with_bar
def noisy(report, *, progress):
    progress.update("capture", "hf <b>", 1, 4)
    print("spilled")
    print("spilled", file=sys.stderr)
    warnings.warn("spilled")
    import tqdm.auto
    write_report(report, Path("out"))
    return report

noisy(json.loads(Path("given.json").read_text()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cell")


@pytest.fixture(scope="module")
def outputs(folder):
    (folder / "given.json").write_text(json.dumps(REPORT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    ExecutePreprocessor(timeout=120, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(folder)}})
    return notebook.cells[0].outputs


def test_the_cell_shows_the_bar_and_the_report_and_nothing_else(outputs):
    assert [item.output_type for item in outputs] == ["display_data", "execute_result"]
    assert outputs[0].data["text/plain"].startswith("parity-audit: ")
    assert "<progress" not in outputs[0].data["text/html"]


def test_the_report_is_shown_as_html(outputs):
    assert outputs[1].data["text/html"] == html.render(REPORT)


def test_the_files_are_whole(outputs, folder):
    assert (folder / "out" / "report.txt").read_text() == terminal.render(REPORT, where="report.json")
    assert (folder / "out" / "report.md").read_text() == markdown.render(REPORT, where="report.json")
    assert json.loads((folder / "out" / "report.json").read_text()) == REPORT
