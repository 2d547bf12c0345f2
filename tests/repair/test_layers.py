"""Edits kept to some layers."""

from parity_audit.core.types import Edit
from parity_audit.repair.layers import on_layers

SCALE = Edit(op="set", path="model.layers[*].attn.scaling", value=0.25)
WINDOWS = Edit(op="set", path="model.layers[*].attn.window", value=[4096, None, 1024])
TABLE = Edit(op="set", path="model.rotary_emb.inv_freq", value=[1.0, 0.5])
EAGER = Edit(op="load", value={"attn_implementation": "eager"})


def test_every_layer_becomes_the_layers_asked_for():
    found = on_layers((SCALE, WINDOWS), (0, 2))

    assert [(edit.path, edit.value) for edit in found] == [
        ("model.layers[0].attn.scaling", 0.25), ("model.layers[2].attn.scaling", 0.25),
        ("model.layers[0].attn.window", 4096), ("model.layers[2].attn.window", 1024),
    ]  # fmt: skip


def test_edits_of_single_layers_are_picked_and_what_lies_outside_the_blocks_is_left():
    norms = [Edit(op="add", path=f"model.layers[{n}].ln.weight", value=1.0) for n in range(12)]
    last = Edit(op="add", path="model.norm.weight", value=1.0)

    assert on_layers((*norms, last), (1, 11)) == (norms[1], norms[11])
    assert on_layers((*norms, last), None) == (*norms, last)


def test_what_all_layers_share_cannot_be_told_by_layer():
    assert on_layers((TABLE,), (0,)) is None
    assert on_layers((EAGER,), (0,)) is None
    assert on_layers((EAGER, SCALE), (1,)) == (EAGER, Edit(op="set", path="model.layers[1].attn.scaling", value=0.25))
