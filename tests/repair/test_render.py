"""Printed patches do what the edits do: run on a small model, against the edits themselves."""

import copy

import pytest
import torch

from parity_audit.backends.edits import LiveEdits
from parity_audit.core.types import Edit
from parity_audit.repair.render import render


class Times(torch.nn.Module):
    times = 1.0

    def forward(self, x):
        return self.times * x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.layers[1].inner = Times()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = layer.inner(x) if hasattr(layer, "inner") else x
        return x


@pytest.mark.parametrize(
    "edit",
    [
        Edit(op="add", path="layers[1].weight", value=-0.75),
        Edit(op="add", path="layers[*].bias", value=0.5),
        Edit(op="scale_output", path="layers[2]", value=1.25),
        Edit(op="scale_output", path="layers[*]", value=0.5),
        Edit(op="set", path="layers[*].inner?.times", value=2.0),
        Edit(op="set", path="layers[*].inner?.times", value=[2.0]),
    ],
)
def test_the_code_has_the_effect_of_the_edit(edit):
    edited, model = Model(), Model()
    shipped = copy.deepcopy(model)
    LiveEdits().bring_to(edited, (edit,))
    exec(render((edit,), "hf"), {"model": model})
    x = torch.randn(5, 4)

    assert torch.equal(model(x), edited(x))
    assert not torch.allclose(model(x), shipped(x))
