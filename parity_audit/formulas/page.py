"""Prints the manual's page of knobs from the table: `python -m parity_audit.formulas.page > docs/knobs.md`."""

from __future__ import annotations

from parity_audit.formulas.knob import Knob
from parity_audit.formulas.knobs import ROWS

HEAD = """# Knobs

One row for each constant and variant that parity-audit knows, made from `parity_audit/formulas/knobs.py` by
`python -m parity_audit.formulas.page`. *Default* holds where a spec does not name the knob. Each is a parameter of a formula in
`parity_audit/formulas/`.

| knob | component | what it is | values | default | may look like |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + "".join(_row(row) for row in ROWS)


def _row(row: Knob) -> str:
    named = [
        f"`{value}`"
        for value in (*row.choices, *(words.format("N") for words in (*row.counted, *row.measured)))
        if not _is_tried(row, value)
    ]
    values = ", ".join([*([row.kind] if row.span is not None or not named else []), *named])
    cells = (
        f"`{row.name}`", row.component, row.meaning, values + (" or none" if row.optional else ""), _shown(row.default),
        ", ".join(f"`{name}`" for name in row.confused_with),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _is_tried(row: Knob, value: object) -> bool:
    """Whether a listed number is only tried by a search, because the knob may be any number; the page leaves it out."""
    return row.span is not None and isinstance(value, float)


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
