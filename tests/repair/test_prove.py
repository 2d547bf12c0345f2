"""When a proof is wanted, and what it says."""

import dataclasses

import pytest

from parity_audit.core.errors import BackendFailed
from parity_audit.core.report import Finding, Verdict
from parity_audit.core.types import Edit
from parity_audit.repair.impose import Imposition, imposed_value
from parity_audit.repair.prove import accepted, set_right, statement, wants_proof

SCALE = Finding(
    knob="attention.scale", kind="constant", layers=None, site="blocks.0.attn_scores", reference_value=16.0,
    candidate_value=14.96663, spec_value=16.0, departs_from_spec="candidate",
)  # fmt: skip
CAP = dataclasses.replace(
    SCALE, knob="attention.softcap", reference_value=None, candidate_value=50.001, spec_value=50.0,
    departs_from_spec="reference",
)  # fmt: skip
UNKNOWN = dataclasses.replace(SCALE, knob="mlp", kind="unexplained")
TF32 = dataclasses.replace(SCALE, knob="numerics.tf32", kind="settings", candidate_value=True)


@pytest.mark.parametrize(
    ("findings", "patched", "expected"),
    [
        ([SCALE], None, True),
        ([SCALE], Verdict.MISMATCH, True),
        ([SCALE], Verdict.PARITY, False),
        ([SCALE, CAP], Verdict.PARITY, True),
        ([UNKNOWN], None, False),
        ([TF32], None, False),
        ([], None, False),
    ],
)
def test_a_proof_is_wanted_where_no_patch_has_said_it_all(findings, patched, expected):
    assert wants_proof(findings, patched) is expected


def test_a_fit_that_agrees_with_the_spec_imposes_the_spec():
    assert imposed_value(CAP) == 50.0
    assert imposed_value(SCALE) == 14.96663


def test_one_list_of_longrope_at_every_length_is_imposed_as_both_lists():
    spec = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 8,
    }
    said = {**spec, "factors": "long at every length"}
    long = dataclasses.replace(SCALE, knob="rope.scaling", candidate_value=said, spec_value=spec)

    assert imposed_value(long) == {**spec, "short_factor": [2.0, 3.0]}
    assert "long at every length" in statement([long], True, [])


def test_a_patch_sets_right_what_whole_runs_show_of_its_knob():
    decoded = dataclasses.replace(SCALE, evidence={"extent": "in tokens decoded from the cache one at a time"})
    whole, only_decoded, other = (Imposition(finding=finding) for finding in (SCALE, decoded, CAP))

    assert set_right([whole, only_decoded, other], {"attention.scale"}) == [whole]


class Picky:
    """A reference that fails on one path and is put back each time."""

    def __init__(self):
        self.applied = []

    def apply(self, edits):
        self.applied.append(edits)
        if any(edit.path == "bad" for edit in edits):
            raise BackendFailed("hf failed during `load`: KeyError: 'x'")

    def restore(self):
        self.applied.append(())


def test_a_value_that_the_reference_fails_on_is_not_imposed_and_why():
    reference = Picky()
    bad, good = (Imposition(finding=SCALE, edits=(Edit(op="set", path=path, value=1),)) for path in ("bad", "good"))

    assert accepted(bad, reference) == Imposition(
        finding=SCALE, why="the reference fails with it: hf failed during `load`: KeyError: 'x'"
    )
    assert accepted(good, reference) is good
    assert reference.applied[1::2] == [(), ()]


def test_the_words():
    assert statement([SCALE], True, []) == (
        "Proved off-line: with attention.scale=14.9666 the reference computes what the candidate computes."
    )
    layer = dataclasses.replace(SCALE, layers=(3,))
    assert statement([layer], False, ["attention.scale"]) == (
        "Not patchable: the candidate has no setting for attention.scale. Not proven: with attention.scale=14.9666 in "
        "layer 3 the reference still does not compute what the candidate computes."
    )
    assert statement([CAP], True, []).endswith("The candidate follows the spec, the reference departs from it.")


def test_what_is_not_imposed_is_said_with_the_reason_and_never_alone():
    aside = [Imposition(finding=UNKNOWN, why="no cause is known")]
    end = " Not imposed: mlp (no cause is known); there the candidate's own values were taken over."

    assert statement([SCALE], True, [], aside=aside) == (
        f"Proved off-line: with attention.scale=14.9666 the reference computes what the candidate computes.{end}"
    )
    assert statement([], True, [], aside=aside) == (
        f"Beside what is not imposed the reference computes what the candidate computes: nothing else is wrong.{end}"
    )
    assert statement([SCALE], False, [], aside=aside, why="9x the noise floor at blocks.2.z").startswith(
        "Not proven: with attention.scale=14.9666 the reference still does not compute what the candidate computes: "
        "9x the noise floor at blocks.2.z. Not imposed: mlp"
    )


def test_a_value_of_the_formulas_is_said_apart_from_the_settings():
    mask = dataclasses.replace(SCALE, knob="attention.mask", candidate_value="not causal", layers=(1,))
    words = statement([SCALE], True, ["attention.mask"], by_formula=[mask])

    assert words == (
        "Not patchable: the candidate has no setting for attention.mask. Proved off-line: with attention.scale=14.9666, "
        "attention.mask=not causal in layer 1 the reference computes what the candidate computes. The reference has no setting "
        "for attention.mask=not causal in layer 1: the formulas with it make the candidate's own values, up to rounding, and "
        "the run went on from those."
    )
