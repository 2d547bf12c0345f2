"""The pytest plugin with the fixture `parity_audit`. Importing it does not load any model library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity_audit.core.report import Report
from parity_audit.testing.assertion import assert_parity


@pytest.fixture(name="parity_audit")
def _parity_audit(tmp_path: Path) -> SimpleNamespace:
    """Provide `parity_audit.assert_parity(...)`, which writes its report to the test's temporary folder (`parity_audit.out`)."""
    out = tmp_path / "parity-audit"
    asserted: Callable[..., Report] = functools.partial(assert_parity, out=out)
    made: Any = SimpleNamespace(assert_parity=asserted, out=out)
    return made  # type: ignore[no-any-return]
