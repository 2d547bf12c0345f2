"""A value that has to be one of a few: refused by name, with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from parity_audit.core.errors import UsageError

SIMILAR = 0.5


def nearest(value: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, empty where nothing is similar."""
    by_lowered = {item.lower(): item for item in known}
    near = difflib.get_close_matches(value.lower(), by_lowered, 1, SIMILAR)
    return f"did you mean `{by_lowered[near[0]]}`?" if near else ""


def require_choice(value: object, known: Iterable[str], *, what: str, code: str, found: str = "") -> str:
    """The value, if it is one of `known`; `what` it is (`a format`) and the error's `code` are the caller's.

    Raises:
        UsageError: it is not.
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
