"""The manual's page of knobs, made from the table: `python -m parity_audit.formulas.page > docs/knobs.md`."""

from __future__ import annotations

from parity_audit.formulas.knobs import ROWS, Knob

HEAD = """# Knobs

One row for each constant and variant that parity-audit knows, made from `parity_audit/formulas/knobs.py` by
`python -m parity_audit.formulas.page`. *Default* holds where a spec does not name the knob. Knobs with *formula* are
parameters of a formula in `parity_audit/formulas/`; the others are so far only read off activations.

| knob | component | what it is | values | default | formula | may look like |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    return HEAD + "".join(_row(row) for row in ROWS)


def _row(row: Knob) -> str:
    values = ", ".join(f"`{value}`" for value in row.choices) or row.kind
    cells = (
        f"`{row.name}`", row.component, row.meaning, values + (" or none" if row.optional else ""), _shown(row.default),
        "yes" if row.formula else "", ", ".join(f"`{name}`" for name in row.confused_with),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
