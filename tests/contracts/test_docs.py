"""The manual keeps up with the code: every error code, every knob, every option has its place."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.core import errors
from parity_audit.matrix.cards import read_cards
from parity_audit.matrix.cells import cells, read_matrix
from parity_audit.matrix.command import Table, rendered
from parity_audit.report import audit_page, json, markdown
from parity_audit.report.terminal import render
from parity_audit.specs.load import list_specs

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r'(?:\bcode=|default_code = |code = )"([a-z-]+)"|"([a-z]+-[a-z-]+)" if \w+ else')
EXAMPLES = sorted((ROOT / "reports" / "examples").glob("*/report.json"))
PAGES = sorted((ROOT / "docs").glob("*.md"))


COMMANDS = (
    "logprobs",
    "invariance",
    "check-divergence",
    "audit",
    "matrix",
    "show",
    "history",
    "capture",
    "diff",
    "selftest",
    "spec check",
    "spec new",
    "envs create",
    "specs list",
    "cache prune",
    "ci",
    "bisect",
    "lint",
    "doctor",
    "spec validate",
    "spec schema",
)


def codes_in_source() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "parity_audit").rglob("*.py")]
    return {first or second for text in texts for first, second in CODE.findall(text)}


def rows() -> dict[str, int]:
    """Code and exit code of every row of docs/errors.md."""
    found = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    return {code: int(exit_code) for code, exit_code in found}


def test_every_error_code_is_explained():
    assert len(codes_in_source()) > 25
    assert codes_in_source() - rows().keys() == set()


def test_no_code_is_explained_that_does_not_exist():
    assert rows().keys() - codes_in_source() == set()


def test_the_exit_codes_of_the_manual_are_those_of_the_classes():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ParityError)]

    assert {kind.default_code: kind.exit_code for kind in kinds}.items() <= rows().items()


def test_every_knob_is_in_the_manual():
    text = (ROOT / "docs" / "specs.md").read_text()
    knobs = {knob for spec in list_specs() for knob in spec.content.knobs}

    assert len(knobs) >= 12
    assert [knob for knob in sorted(knobs) if f"`{knob}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_command_of_the_manual_exists(page):
    commands = re.findall(
        r"parity-audit ((?:envs|specs|spec|cache) [a-z]+|capture|diff|doctor|audit)\b", page.read_text()
    )

    for command in sorted(set(commands)):
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_every_option_of_the_manual_exists(page):
    help_text = "".join(CliRunner().invoke(app, [*command.split(), "--help"]).output for command in COMMANDS)
    options = set(
        re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", " ".join(re.findall(r"parity-audit [^\n`|]*", page.read_text())))
    )

    assert [option for option in sorted(options) if option not in help_text + " --help --version"] == []


def test_every_worked_example_has_the_command_that_makes_it_again():
    """`benchmarks/examples.py` reads these lines."""
    listed = re.findall(
        r"^- `([\w.-]+)`: `parity-audit [^`]+`$", (ROOT / "reports" / "README.md").read_text(), re.MULTILINE
    )

    assert sorted(listed) == [path.parent.name for path in EXAMPLES]


def test_the_readme_quotes_the_worked_example():
    """Render the committed report.json: what the README shows is what it says, line by line and in that order."""
    report = json.loads((ROOT / "reports" / "examples" / "gemma-2-2024" / "report.json").read_text())
    rendered = iter(render(report).splitlines())
    quoted = re.search(r"^```\n\$ parity-audit .*\n([^`]*)```", (ROOT / "README.md").read_text(), re.MULTILINE)[1]

    assert [line for line in quoted.splitlines() if line != "..." and line not in rendered] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_text_of_a_worked_example_is_the_rendering_of_its_json(path):
    report = json.loads(path.read_text())

    assert path.with_name("report.txt").read_text() == render(report, where="report.json")
    assert path.with_name("report.md").read_text() == markdown.render(report, where="report.json")
    assert path.with_name("report.html").read_text() == audit_page.render(report)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_a_worked_example_names_no_directory_of_the_machine_it_ran_on(path):
    texts = [item.read_text() for item in path.parent.iterdir() if item.is_file()]
    assert [found for text in texts for found in re.findall(r"/(?:home|root|work|tmp|Users|var)/\S*", text)] == []


@pytest.mark.parametrize("name", ["audit.ipynb", "live.ipynb"])
def test_a_notebook_was_run_whole_and_shows_a_report(name):
    """Its cells are those that were run, in order and without an error, and no path of that machine is in it."""
    text = (ROOT / "docs" / name).read_text()
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "error" not in {output.output_type for output in outputs}
    assert any("parity-audit" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert re.findall(r"/(?:home|root|work|tmp|Users)/", text) == []


def test_every_architecture_of_the_committed_matrix_has_a_row_or_is_said_to_be_missing():
    table = (ROOT / "reports" / "matrix.md").read_text()
    asked = cells(read_matrix(ROOT / "reports" / "matrix.yaml"))
    cards = read_cards(ROOT / "reports" / "cards")
    missing = [one for one in asked if one not in {card.asked for card in cards}]

    assert table == rendered(Table(cards=tuple(cards), not_run=tuple(missing), exit_code=0), "markdown")
    assert len(cards) + len(missing) == len(asked)
