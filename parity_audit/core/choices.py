"""Validate a value that must be one of a few; the error message suggests the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from parity_audit.core.errors import UsageError

SIMILAR = 0.5


def nearest(value: str, known: Iterable[str]) -> str:
    """Return a hint `did you mean ...?`; empty if no known value is similar."""
    by_lowered = {item.lower(): item for item in known}
    near = difflib.get_close_matches(value.lower(), by_lowered, 1, SIMILAR)
    return f"did you mean `{by_lowered[near[0]]}`?" if near else ""


def require_choice(value: object, known: Iterable[str], *, what: str, code: str, found: str = "") -> str:
    """Return the value if it is one of `known`.

    Args:
        value: the value to check.
        known: the values that are allowed.
        what: what the value should be, for the message (`a format`).
        code: the code of the error.
        found: the text of the error's `found` line.

    Raises:
        UsageError: the value is not one of `known`.
    """
    names = tuple(known)
    if value not in names:
        raise UsageError(
            f"`{value}` is not {what}",
            code=code,
            expected=", ".join(names),
            found=found,
            hint=nearest(str(value), names),
        )
    return str(value)
