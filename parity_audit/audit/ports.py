"""Check the user's own port without running it: its file, its function and settings, and its interpreter."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

from parity_audit.core.choices import nearest
from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef

HARNESS = ("env", "python", "sites", "tf32")
N_FIXED_ARGUMENTS = 3
"""The number of arguments that every port is called with: `load(model_path, dtype, device)`."""


def check_port(ref: BackendRef) -> None:
    """Refuse a port whose mistakes can be seen without running it.

    Raises:
        UsageError: the interpreter does not exist, the file is not Python, or it has no such function or setting.
    """
    file, _, name = str(ref.target).rpartition(":")
    elsewhere = "env" in ref.settings or "python" in ref.settings
    if "python" in ref.settings:
        _check_interpreter(str(ref.settings["python"]), ref)
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if elsewhere and isinstance(error, SyntaxError):
            return  # the port runs in another Python, which may accept a syntax that this one does not
        line = getattr(error, "lineno", None)
        raise UsageError(f"the port is no Python: {error}", code="port-file", where=f"{file}:{line or 1}") from error
    bound = _bound(tree)
    if name not in bound and not _is_dynamic(tree):
        functions = [item.name for item in tree.body if isinstance(item, ast.FunctionDef)]
        raise UsageError(
            f"{Path(file).name} has no function `{name}`", code="port-file", where=file,
            expected=", ".join(functions) or "a function at the top of the file", hint=nearest(name, functions),
        )  # fmt: skip
    if isinstance(defined := bound.get(name), ast.FunctionDef) and not defined.decorator_list:
        _check_settings(ref, defined)


def _check_interpreter(python: str, ref: BackendRef) -> None:
    path = shutil.which(python)
    if path is None or not os.access(path, os.X_OK):
        raise UsageError(f"no interpreter `{python}`", code="port-file", where=python, found=str(ref))


def _check_settings(ref: BackendRef, function: ast.FunctionDef) -> None:
    """Refuse settings that the port's function does not take as arguments."""
    taken = function.args
    names = [item.arg for item in (*taken.posonlyargs, *taken.args)[N_FIXED_ARGUMENTS:]] + [
        item.arg for item in taken.kwonlyargs
    ]
    for key in ref.settings:
        if key not in HARNESS and key not in names and taken.kwarg is None:
            raise UsageError(
                f"`{function.name}` takes no `{key}`", code="backend-setting", found=str(ref),
                expected=", ".join((*names, *HARNESS)), hint=nearest(key, (*names, *HARNESS)),
            )  # fmt: skip


def _bound(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the names that top-level statements of the file bind, each with its statement."""
    found: dict[str, ast.stmt] = {}
    for item in tree.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[item.name] = item
        elif isinstance(item, (ast.Import, ast.ImportFrom)):
            found |= {(name.asname or name.name).partition(".")[0]: item for name in item.names}
        else:
            stored = (
                node.id for node in ast.walk(item) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
            found |= dict.fromkeys(stored, item)
    return found


def _is_dynamic(tree: ast.Module) -> bool:
    """Return whether the file may define names that `_bound` cannot see: below `if` or `try`, from `*`, by `globals()`."""
    hidden = ("globals", "exec", "setattr", "__getattr__", "vars")
    blocks = (ast.If, ast.Try, ast.With, ast.For, ast.While)
    return any(
        (isinstance(node, blocks) and node in tree.body)
        or (isinstance(node, ast.alias) and node.name == "*")
        or (isinstance(node, ast.Name) and node.id in hidden)
        or (isinstance(node, ast.FunctionDef) and node.name in hidden)
        for node in ast.walk(tree)
    )  # fmt: skip
