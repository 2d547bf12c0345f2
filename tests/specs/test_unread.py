"""Keys that the spec does not read are listed where they change what transformers computes, and only there."""

import dataclasses

import pytest

from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.unread import unread_keys


@pytest.mark.parametrize("name", [spec.first_model for spec in list_specs()])
def test_a_released_config_is_read_whole(name):
    assert unread_keys(resolve_model(name)) == []


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, False),
        ("gpt2", "scale_attn_weights", False, False),
        ("microsoft/phi-2", "qk_layernorm", True, True),
        ("meta-llama/Llama-3.2-1B", "mlp_bias", True, True),
        ("meta-llama/Llama-3.2-1B", "favourite_colour", "blue", False),
        ("meta-llama/Llama-3.2-1B", "attention_dropout", 0.1, False),
    ],
)
def test_a_key_that_is_off_its_default(name, key, value, expected):
    model = resolve_model(name)
    found = unread_keys(dataclasses.replace(model, config={**model.config, key: value}))

    if expected is False:
        assert found == []
    else:
        assert [item[:2] for item in found] == [(key, value)]
        assert found[0][2] is expected
