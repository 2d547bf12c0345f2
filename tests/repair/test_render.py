"""Printed patches do what the edits do: run on a small model, against the edits themselves."""

import copy

import pytest
import torch

from parity_audit.backends.edits import LiveEdits
from parity_audit.core.types import Edit
from parity_audit.repair.render import render
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.settings import edits
from parity_audit.specs.view import knob_values, section

BACKENDS = ("hf", "nnsight", "hooked_transformer", "transformer_bridge", "vllm", "sglang")


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


@pytest.mark.parametrize("name", [spec.first_model for spec in list_specs()])
def test_every_setting_of_a_spec_is_printed_as_python(name):
    model = resolve_model(name)
    said = knob_values(model.spec, model.config)
    printed = [
        render(made, backend, {})
        for backend in BACKENDS
        for knob in section(model.spec, backend, "").knobs
        for value in [said[knob].value if knob in said and said[knob].value is not None else 1.0]
        if (made := edits(model.spec, backend, knob, value, model.config, "", {}))
    ]

    assert printed
    for code in printed:
        compile(code, name, "exec")
