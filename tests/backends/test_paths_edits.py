"""Paths into live objects, and edits that can be undone."""

from types import SimpleNamespace

import pytest
import torch

from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.paths import NoSuchPath, get, matches
from parity_audit.core.types import Edit


def model():
    attns = [SimpleNamespace(scale=1.0, mask=torch.ones(6, 6, dtype=torch.bool).tril(),
                             rotary_sin=torch.zeros(5, 4), rotary_cos=torch.zeros(5, 4)) for _ in range(2)]  # fmt: skip
    return SimpleNamespace(cfg=SimpleNamespace(cap=50.0), blocks=[SimpleNamespace(attn=attn) for attn in attns])


def test_star_means_every_element():
    assert [path for path, _ in matches(model(), "blocks[*].attn.scale")] == [
        "blocks[0].attn.scale",
        "blocks[1].attn.scale",
    ]


def test_a_missing_path_says_where_it_ends():
    with pytest.raises(NoSuchPath, match=r"`sale`.*blocks"):
        get(model(), "blocks[0].attn.sale")


def test_edits_are_read_back_and_undone():
    live, root = LiveEdits(), model()
    read = live.bring_to(
        root, (Edit(op="set", path="blocks[*].attn.scale", value=[2.0, 3.0]), Edit(path="cfg.cap", op="set"))
    )

    assert [(item.before, item.after) for item in read] == [(1.0, 2.0), (1.0, 3.0), (50.0, None)]

    live.bring_to(root, ())

    assert [value for _, value in matches(root, "blocks[*].attn.scale")] == [1.0, 1.0]
    assert root.cfg.cap == 50.0


def test_a_failing_edit_leaves_nothing_behind():
    live, root = LiveEdits(), model()
    with pytest.raises(NoSuchPath):
        live.bring_to(root, (Edit(op="set", path="cfg.cap", value=1.0), Edit(op="set", path="cfg.nothing.x", value=1)))

    assert root.cfg.cap == 50.0


def test_rotary_tables_are_sines_of_position_times_frequency():
    live, root = LiveEdits(), model()
    live.bring_to(root, (Edit(op="rotary_tables", path="blocks[*].attn", value={"inv_freq": [1.0, 0.25]}),))
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.25, 1.0, 0.25])

    assert torch.allclose(root.blocks[1].attn.rotary_sin, angles.sin())


def test_windows_keep_that_many_keys():
    live, root = LiveEdits(), model()
    live.bring_to(root, (Edit(op="causal_windows", path="blocks[*].attn.mask", value=[3, None]),))

    assert root.blocks[0].attn.mask.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert root.blocks[1].attn.mask.sum(-1).tolist() == [1, 2, 3, 4, 5, 6]


def two_layers():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])})


def run(root):
    out = torch.arange(3.0)
    for layer in root.layers:
        out = layer(out)
    return out.detach()


def test_numbers_are_added_to_tensors_and_taken_away_again():
    live, root = LiveEdits(), two_layers()
    root.layers = root["layers"]
    before, weights = run(root), [layer.weight.clone() for layer in root.layers]
    live.bring_to(root, (Edit(op="add", path="layers[*].weight", value=0.5),))

    assert [torch.equal(layer.weight, old + 0.5) for layer, old in zip(root.layers, weights, strict=True)] == [True] * 2
    assert all(isinstance(layer.weight, torch.nn.Parameter) for layer in root.layers)

    live.bring_to(root, ())

    assert torch.equal(run(root), before)


def test_outputs_are_multiplied_and_the_read_back_says_so():
    live, root = LiveEdits(), two_layers()
    root.layers = root["layers"]
    before = run(root)
    read = live.bring_to(root, (Edit(op="scale_output", path="layers[1]", value=3.0),))

    assert torch.equal(run(root), 3 * before)
    assert read[0].after == "output times 3.0"

    live.bring_to(root, ())

    assert torch.equal(run(root), before)


def test_a_part_that_an_element_need_not_have_is_left_out():
    root = SimpleNamespace(layers=[SimpleNamespace(k_norm=SimpleNamespace(eps=1e-6)), SimpleNamespace()])

    assert [path for path, _ in matches(root, "layers[*].k_norm?.eps")] == ["layers[0].k_norm.eps"]
    with pytest.raises(NoSuchPath):
        list(matches(root, "layers[*].k_norm.eps"))
