"""Synthetic checkpoints: constants are the release's, sizes are small, nothing that hides a fault is left at its default."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from parity_audit.core.errors import UsageError
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
}
TOKENIZER = {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype"}


@pytest.mark.parametrize("name", ["gemma-2-2b-it", "meta-llama/Llama-3.2-1B", "gemma-2-27b", "llama-2-7b"])
def test_only_sizes_are_replaced(name, cache):
    model = resolve_model(name)
    made = miniature.make(model, root=cache / "synthetic")
    config = json.loads((Path(made.path) / "config.json").read_text())

    changed = {key for key in config if config[key] != model.config.get(key)}

    assert changed <= SIZES | TOKENIZER
    # Heads are grouped where the release groups them.
    assert grouped(config) == grouped(model.config)
    assert config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]


def grouped(config):
    return config["num_key_value_heads"] < config["num_attention_heads"]


def test_norm_weights_are_neither_one_nor_zero(gemma):
    weights = load_file(next(Path(gemma.path).glob("*.safetensors")))
    norms = [value for name, value in weights.items() if "norm" in name]

    assert norms
    assert all(norm.std() > 0.1 for norm in norms)


def test_seeds_differ_and_repeat(cache, tmp_path):
    model = resolve_model("gemma-2-2b-it")
    first = miniature.make(model, seed=0, root=cache / "synthetic")
    again = miniature.make(model, seed=0, root=tmp_path)
    other = miniature.make(model, seed=1, root=tmp_path)

    def data(made):
        return (Path(made.path) / "model.safetensors").read_bytes()

    assert data(first) == data(again)
    assert data(first) != data(other)
    assert first.fingerprint != other.fingerprint


def test_unknown_size(tmp_path):
    with pytest.raises(UsageError, match="not a size"):
        miniature.make(resolve_model("gemma-2-2b-it"), size="medium", root=tmp_path)
