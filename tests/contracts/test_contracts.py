"""The walls of the building: imports, sizes, schema, commands of the README, bare interpreters."""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import parity_audit.core.errors as errors
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.report import Report
from parity_audit.report.schema import report_schema, schema_text

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "parity_audit"
EXAMPLES = sorted((ROOT / "reports" / "examples").glob("*/report.json"))


def test_imports_point_down():
    done = subprocess.run([str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_types_are_checked():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_style_is_checked():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_files_and_functions_are_small():
    sizes = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in sizes
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]

    assert max(sizes.values()) <= 400, max(sizes, key=sizes.__getitem__)
    assert statistics.median(sizes.values()) <= 130
    assert statistics.median(functions) <= 12


BARE = "import sys; sys.path.insert(0, {root!r}); import parity_audit.core.{module}; print('torch' in sys.modules)"


@pytest.mark.parametrize("module", [path.stem for path in (PACKAGE / "core").glob("[a-z]*.py")])
def test_core_imports_nothing_heavy(module):
    done = subprocess.run(
        [sys.executable, "-I", "-c", BARE.format(root=str(ROOT), module=module)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


def test_the_bare_import_test_can_fail():
    code = "import sys, torch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def test_every_error_knows_its_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ParityError)]

    assert len(kinds) >= 8
    assert {kind.exit_code for kind in kinds} == {errors.EXIT_USAGE, errors.EXIT_NOT_JUDGED, errors.EXIT_INTERRUPTED}


def test_the_published_schema_is_up_to_date():
    assert (ROOT / "docs" / "report.schema.json").read_text() == schema_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_worked_examples_are_valid_reports(path):
    plain = json.loads(path.read_text())

    jsonschema.validate(plain, report_schema())
    assert json.loads(dumps(from_plain(Report, plain))) == plain


def test_there_are_worked_examples():
    assert len(EXAMPLES) >= 2


def test_the_readme_has_two_set_up_commands_and_ci_runs_the_second():
    commands = re.findall(r"^python3 install.py.*$", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_links_of_the_readme_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []


def test_functions_of_the_api_are_not_hidden_by_subpackages_of_their_name():
    code = "import parity_audit as p, parity_audit.capture.store, parity_audit.audit.run, parity_audit.api as api\n"
    code += "print(all(getattr(p, name) is getattr(api, name) for name in ('audit', 'capture', 'diff')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
