"""Tensors that hold another tensor's numbers: which, and blocks that are exchanged as one matter."""

import torch

from parity_audit.backends.prints import fingerprint
from parity_audit.core.report import Finding
from parity_audit.diagnose.preflight import weight_findings
from parity_audit.diagnose.weights import with_origins, without_consequences

NAMES = ("attn.q_proj.weight", "mlp.up_proj.weight")


def checkpoint(blocks=3):
    made = torch.Generator().manual_seed(1)
    return {f"model.layers.{i}.{name}": torch.randn(6, 4, generator=made) for i in range(blocks) for name in NAMES}


def prints(tensors):
    return [fingerprint(name, value) for name, value in tensors.items()]


def found(ours):
    sides = prints(checkpoint()), prints(ours)
    return with_origins(weight_findings(*sides, "float32")[0], *sides, "float32")


def test_the_checkpoint_itself_is_no_finding():
    assert found(checkpoint()) == []


def test_exchanged_blocks_are_one_finding():
    ours = checkpoint()
    for name in NAMES:
        one, two = f"model.layers.1.{name}", f"model.layers.2.{name}"
        ours[one], ours[two] = ours[two], ours[one]
    (only,) = found(ours)

    assert only.layers == (1, 2)
    assert only.candidate_value == "block 1 holds those of block 2, block 2 holds those of block 1"
    assert len(only.evidence["tensors"]) == 4


def test_a_tensor_that_is_another_says_which():
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = ours["model.layers.0.attn.q_proj.weight"]
    (only,) = found(ours)
    assert (only.candidate_value, only.layers) == ("model.layers.0.attn.q_proj.weight", (0,))


def test_a_tensor_that_is_no_other_keeps_its_numbers():
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = 2 * ours["model.layers.0.mlp.up_proj.weight"]
    (only,) = found(ours)
    assert "holds" not in only.evidence
    assert only.candidate_value == 2 * only.reference_value


def finding(knob, kind, component="", layers=(0,)):
    return Finding(
        knob=knob, kind=kind, layers=layers, site="x", reference_value=None, candidate_value=None, confidence=0.9,
        departs_from_spec="candidate", evidence={"component": component}, message="",
    )  # fmt: skip


def test_what_follows_from_a_wrong_tensor_is_not_said_twice():
    tensor_of = {("mlp.up", 0): "model.layers.0.mlp.up_proj.weight", ("mlp.up", 1): "model.layers.1.mlp.up_proj.weight"}
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = torch.zeros(6, 4)
    weights = found(ours)
    follows, elsewhere = finding("mlp", "unexplained", "mlp"), finding("mlp", "unexplained", "mlp", (1,))
    how, constant = finding("weights.mlp.up", "weights"), finding("mlp.activation", "variant")

    kept = without_consequences([follows, elsewhere, how, constant], weights, tensor_of)
    assert kept == [elsewhere, how, constant]
