"""Which constants of a diagnosis a test notices: each is multiplied, then divided by ten, and tests of its module are run.

    python benchmarks/constants.py                      # every constant of parity_audit/diagnose and parity_audit/formulas
    python benchmarks/constants.py fit/search.py forms  # those of files whose path has one of these parts

One line per constant and direction, up to the first that is noticed: the first test that fails, or `NOT NOTICED`. Published values
(GELU's 0.044715, YaRN's thresholds) are changed too; tables, names and bounds of what is printed or kept in memory are left out.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("parity_audit/diagnose", "parity_audit/formulas")
VARIABLE = "PARITY_AUDIT_MUTATED"
TESTS = {
    "diagnose/agreement.py": "test_findings.py test_fit.py", "diagnose/findings.py": "test_findings.py",
    "diagnose/thresholds.py": "test_fit.py test_describe.py test_narrow.py test_embedding_mlp_logits.py",
    "diagnose/confidence.py": "test_confidence.py", "diagnose/describe.py": "test_describe.py",
    "diagnose/extent.py": "test_extent.py",
    "diagnose/fit/by_head.py": "test_mask_and_heads.py test_attention_laws.py",
    "diagnose/fit/by_pair.py": "test_rotary.py test_rotary_forms.py", "diagnose/fit/by_token.py": "test_positions.py",
    "diagnose/fit/": "test_fit.py test_causes.py",
    "diagnose/forms/": "test_forms.py test_forms_attended.py test_describe.py", "diagnose/identities.py": "test_identities.py",
    "diagnose/narrow.py": "test_narrow.py", "diagnose/numerics.py": "test_numerics.py", "diagnose/returned.py": "test_returned.py",
    "diagnose/routing.py": "test_routing.py", "diagnose/structure/rows.py": "test_embedding_mlp_logits.py",
    "diagnose/structure/": "test_linear.py", "formulas/alibi.py": "test_attention_laws.py",
    "formulas/activations.py": "test_activation.py test_experts.py", "formulas/experts.py": "test_router.py test_routing.py",
    "formulas/": "test_rotary.py test_positions.py",
}  # fmt: skip
"""The tests of a file beside `test_constants.py`, by the part of its path that comes first here."""
BOUNDS = ("DRAWN", "MOST_TOKENS", "MOST_CHANNELS", "MOST_IDS", "FEW", "PARTS", "HELD", "SHOWN", "BLOCK_NUMBERS", "QUERY_ROWS",
          "FOLD", "BLOCK_ROWS", "MOST_POINTS", "LEAST_ERROR", "SEEN")  # fmt: skip
"""What is printed or kept in memory, and stand-ins for zero."""


def constants(parts: list[str]) -> Iterator[tuple[str, str]]:
    """Module and name of every constant that is a number, or several numbers."""
    for file in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        where = str(file.relative_to(ROOT / "parity_audit"))
        if parts and not any(part in where for part in parts):
            continue
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            target = node.targets[0]
            names = [target] if isinstance(target, ast.Name) else getattr(target, "elts", [])
            values = [node.value] if isinstance(target, ast.Name) else getattr(node.value, "elts", [])
            for name, value in zip(names, values, strict=False):
                if _is_number(value) and name.id not in BOUNDS:
                    yield f"parity_audit.{where.removesuffix('.py').replace('/', '.')}", name.id


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is a number alone: `6.0`, `2.0**-20`, `12**-0.5`."""
    held = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    plain = all(
        isinstance(part, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)) for part in ast.walk(node)
    )
    return plain and bool(held) and all(isinstance(value, (int, float)) for value in held)


def pytest_collection_finish() -> None:
    """Change the constant in every module that has it, once all of them are imported."""
    module, name, factor = os.environ[VARIABLE].split(":")
    before = getattr(import_module(module), name)
    after = type(before)(max(before * float(factor), 1)) if isinstance(before, int) else before * float(factor)
    for one in [one for key, one in sys.modules.items() if key.startswith("parity_audit")]:
        if getattr(one, name, None) == before and type(getattr(one, name)) is type(before):
            setattr(one, name, after)


def noticed(module: str, name: str, factor: float) -> str:
    """The first test that fails with the constant changed, empty where all pass."""
    path = module.removeprefix("parity_audit.").replace(".", "/") + ".py"
    tests = ["test_constants.py", *next(own for part, own in TESTS.items() if path.startswith(part)).split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "benchmarks.constants", "--durations=0"]
    done = subprocess.run(
        [*command, *(f"tests/diagnose/{test}" for test in tests)], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, VARIABLE: f"{module}:{name}:{factor}"},
    )  # fmt: skip
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(done.stdout + done.stderr)
    found = re.search(r"^FAILED \S*/(\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else ""


def main(parts: list[str]) -> None:
    """Print what was noticed."""
    for module, name in constants(parts):
        for factor in (10.0, 0.1):
            by = noticed(module, name, factor)
            print(f"{module.removeprefix('parity_audit.')}.{name} times {factor:g}: {by or 'NOT NOTICED'}", flush=True)
            if by:
                break


if __name__ == "__main__":
    main(sys.argv[1:])
