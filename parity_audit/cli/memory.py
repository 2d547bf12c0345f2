"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from parity_audit.core.errors import UsageError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bytes_of(text: str) -> int:
    """`2GiB`, `500MB` or `1073741824` as bytes.

    Raises:
        UsageError: another form, or nothing at all.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if size <= 0:
        raise UsageError(f"`{text}` is no size of memory or disk", code="usage", expected="for example 2GiB or 500MB")
    return size
