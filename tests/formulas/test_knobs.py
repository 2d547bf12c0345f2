"""The table of knobs against the specs, the formulas and the manual."""

from pathlib import Path

import pytest

from parity_audit.diagnose.findings import DEFAULTS
from parity_audit.formulas.activations import CLAMPED, CLAMPED_ALONE, NAMED
from parity_audit.formulas.experts import SCORES
from parity_audit.formulas.knob import CHOICE, COUNT, FLAG, REAL, ROUNDING
from parity_audit.formulas.knobs import KNOBS, ROWS, name_in_spec
from parity_audit.formulas.page import page
from parity_audit.specs.load import list_specs

ROOT = Path(__file__).parents[2]


def test_names_are_unique_and_rows_are_whole():
    assert len(KNOBS) == len(ROWS)
    for row in ROWS:
        assert row.meaning.endswith("."), row.name
        assert set(row.confused_with) <= set(KNOBS), row.name
        if row.kind in (REAL, COUNT):
            assert row.span is not None, row.name
            assert row.span[0] < row.span[1], row.name
        if row.kind in (CHOICE, FLAG, ROUNDING):
            assert row.choices, row.name


def test_every_knob_of_a_spec_has_a_row():
    assert {knob for spec in list_specs() for knob in spec.content.knobs} <= set(KNOBS)


def test_what_formulas_take_is_what_the_table_says():
    source = "".join(path.read_text() for path in (ROOT / "parity_audit" / "formulas").glob("*.py"))
    asked = {row.name for row in ROWS if f'knob("{row.name}")' in source}
    asked |= {f"attention.{part}_bias" for part in "qkvo"}
    asked |= {row.name for row in ROWS if f'knob(f"{{prefix}}.{row.name.partition(".")[2]}")' in source and
              row.name.startswith(("norm.", "qk_norm."))}  # fmt: skip

    assert asked == {row.name for row in ROWS}


def test_choices_are_those_of_the_formulas():
    assert set(KNOBS["mlp.activation"].choices) == {*NAMED, CLAMPED, CLAMPED_ALONE}
    assert set(KNOBS["moe.router"].choices) == set(SCORES)


def test_judged_rows_are_what_findings_compare_without_a_spec():
    judged = {row.name: row.default for row in ROWS if row.judged}

    assert judged.items() <= DEFAULTS.items()


def test_the_manual_has_this_table():
    assert (ROOT / "docs" / "knobs.md").read_text() == page()


@pytest.mark.parametrize(
    ("knob", "known", "name"),
    [
        ("qk_norm.eps", {"norm.eps"}, "norm.eps"),
        ("qk_norm.eps", {"norm.eps", "qk_norm.eps"}, "qk_norm.eps"),
        ("qk_norm.order", {"norm.order"}, None),
        ("rope.theta", {"norm.eps"}, None),
    ],
)
def test_what_is_said_of_norms_holds_for_norms_of_heads_but_not_where_they_stand(knob, known, name):
    assert name_in_spec(knob, known) == name
