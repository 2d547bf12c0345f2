"""Three audits in one notebook, executed whole: each cell shows one tidy report and nothing else, and the files are whole."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbconvert.preprocessors import ExecutePreprocessor

import parity_audit
from parity_audit.report import html, json, markdown, terminal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PORT = Path(__file__).parents[1] / "ports" / "plain_llama.py"
AUDITS = {
    "parity": ("gpt2", "transformer_lens"),
    "mismatch": ("gemma-2-2b-it", "hf,attn_implementation=sdpa"),
    "error": ("meta-llama/Llama-3.2-1B", f"python:{PORT}:forgot_to_return"),
}
CELL = """
import parity_audit
parity_audit.audit({model!r}, candidates={candidate!r}, miniature="mini", probes="short", repair=False, limits=False, out={out!r})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def cells(folder):
    """The executed cells by their name."""
    sources = [CELL.format(model=model, candidate=one, out=str(folder / name)) for name, (model, one) in AUDITS.items()]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    ExecutePreprocessor(timeout=500, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(folder)}})
    return dict(zip(AUDITS, notebook.cells, strict=True))


@pytest.mark.parametrize("name", AUDITS)
def test_a_cell_shows_a_finished_bar_and_one_report(cells, name):
    bar, report = cells[name].outputs

    assert bar.output_type == "display_data"
    assert bar.data["text/plain"].startswith("parity-audit: ")
    assert "<progress" not in bar.data["text/html"]
    assert report.output_type == "execute_result"
    assert report.data["text/html"].startswith('<div class="parity-audit">')


@pytest.mark.parametrize("name", AUDITS)
def test_the_files_are_whole(folder, name):
    out = folder / name
    report = json.loads((out / "report.json").read_text())

    assert report.candidates[0].verdict.value in ("parity", "exact") if name == "parity" else name
    assert (out / "report.txt").read_text() == terminal.render(report, where="report.json")
    assert (out / "report.md").read_text() == markdown.render(report, where="report.json")
    assert len((out / "report.txt").read_text().splitlines()) > 15


@pytest.mark.parametrize("name", AUDITS)
def test_the_display_is_the_report_in_the_file(cells, folder, name):
    report = json.loads((folder / name / "report.json").read_text())

    assert report.candidates[0].verdict is parity_audit.Verdict(name) or report.candidates[0].verdict.value == "exact"
    assert html.render(report) == cells[name].outputs[1].data["text/html"]
