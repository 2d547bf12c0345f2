"""A port that holds another checkpoint is one finding; one projection with other weights, or a law for all, is not that."""

from parity_audit.checks.other_checkpoint import other_checkpoint_as_one
from parity_audit.core.report import Finding
from parity_audit.core.types import WeightPrint
from parity_audit.diagnose.structure.sample import NOT_STORED

NAMES = [f"layers.{at}.{role}" for at in range(5) for role in ("q", "k", "up", "norm")]
COMPARED = [WeightPrint(name=name, shape=(2, 2), rms=1.0, sketch=(), sha256="") for name in NAMES]


def finding(knob, value, tensors):
    return Finding(
        knob=knob, kind="weights", layers=None, site=tensors[0], reference_value=None, candidate_value=value,
        confidence=0.9, departs_from_spec="candidate", evidence={"tensor": tensors[0], "tensors": tensors}, message="",
    )  # fmt: skip


def of(role):
    return [name for name in NAMES if name.endswith(f".{role}")]


UP, K = finding("weights.mlp.up", NOT_STORED, of("up")), finding("weights", 0.3, of("k"))
Q, GAIN = finding("weights.attn.q", NOT_STORED, of("q")), finding("ln1.out.gain", "0.9 to 1.1", of("norm"))


def test_tensors_that_nearly_all_hold_other_values_are_one_checkpoint():
    scale = finding("attention.scale", 8.0, ["blocks.0.attn_scores"])
    one, rest = other_checkpoint_as_one([UP, K, Q, GAIN, scale], COMPARED)

    assert (one.knob, one.candidate_value, one.layers) == ("weights", "another checkpoint's", None)
    assert one.message.startswith("20 of 20 tensors")
    assert one.evidence == {"tensors": sorted(NAMES), "compared": 20}
    assert rest is scale


def test_norms_that_were_frozen_change_nothing_and_two_projections_are_no_checkpoint():
    assert len(other_checkpoint_as_one([UP, K, Q], COMPARED)) == 1
    assert other_checkpoint_as_one([UP, K], COMPARED) == [UP, K]
    assert other_checkpoint_as_one([finding("weights", 0.3, NAMES)], COMPARED)[0].candidate_value == 0.3


def test_a_law_for_a_projection_is_kept():
    rounded = finding("weights.attn.q", "the checkpoint's rounded to int8 by row", of("q"))
    moved = finding("weights", 0.3, of("k"))
    moved.evidence["holds"] = "layers.1.k"

    assert other_checkpoint_as_one([UP, K, GAIN, rounded], COMPARED)[1:] == [rounded]
    assert other_checkpoint_as_one([UP, moved, rounded], COMPARED) == [UP, moved, rounded]
