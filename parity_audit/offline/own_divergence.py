"""Load a user's own divergence function from its file and find out which divergence it computes."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity_audit.compare.divergence_check import Checked, check_divergence
from parity_audit.core.errors import NotJudged, UsageError


def check_own_divergence(target: str) -> Checked:
    """Check the function `FILE:FUNCTION`. The file is imported, so its code is executed.

    Raises:
        UsageError: there is no such file or function.
        NotJudged: the file cannot be imported, or the function never returned a finite number.
    """
    found = check_divergence(_function(target))
    if found.computes is None and not found.values:
        raise NotJudged(
            f"{target} gave no number to check: {found.problem}", code="divergence", where=target,
            hint="it is called as f(teacher, student, beta) with tensors [1, pos, d_vocab]",
        )  # fmt: skip
    return found


def _function(target: str) -> Callable[..., Any]:
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise UsageError(f"no file in `{target}`", code="divergence-file", expected="FILE:FUNCTION", where=str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NotJudged(f"{path} cannot be imported: {type(error).__name__}: {error}", code="divergence") from error
    finally:
        sys.path.pop(0)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, vars(module), 1)
        hint = f"did you mean `{near[0]}`?" if near else "write it as FILE:FUNCTION"
        raise UsageError(f"{path} has no function `{name}`", code="divergence-file", hint=hint)
    return function
