"""What the tables of a report hold."""

from __future__ import annotations

from dataclasses import replace

from sample import CLEAN

from parity_audit.core.types import NotTested
from parity_audit.report.rows import not_tested


def test_a_hook_that_no_layer_has_takes_one_row_and_another_reason_its_own():
    def refused(layer: int, why: str = "") -> NotTested:
        name = f"blocks.{layer}.ln1.hook_scale"
        return NotTested(what=name, why=why or f"the release refuses the hook: {name} does not exist")

    gaps = (refused(0), refused(1), refused(2, "out of memory"))
    rows = not_tested(replace(CLEAN, not_tested=gaps))

    assert rows == [
        ("blocks.*.ln1.hook_scale", "the release refuses the hook: blocks.*.ln1.hook_scale does not exist"),
        ("blocks.2.ln1.hook_scale", "out of memory"),
    ]
