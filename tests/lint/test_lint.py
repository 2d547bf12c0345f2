"""A lint on known tables: fields of TransformerLens as knob values, and on the release of 2024 itself."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.lint.compare import same
from parity_audit.lint.transformer_lens import knobs_of

FIELDS = {
    "attn_scale": 16.0, "use_attn_scale": True, "attn_scores_soft_cap": 50.0, "output_logits_soft_cap": -1.0, "eps": 1e-6,
    "normalization_type": "RMS", "n_key_value_heads": None, "n_heads": 8, "act_fn": "gelu_pytorch_tanh", "use_local_attn": True,
    "window_size": 4096, "attn_types": ["local", "global", "local"], "rotary_base": 10000, "rotary_dim": 256,
    "positional_embedding_type": "rotary", "use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 32.0,
    "NTK_by_parts_low_freq_factor": 1.0, "NTK_by_parts_high_freq_factor": 4.0,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_fields_are_knob_values():
    found = {knob: value for knob, (_, value) in knobs_of(FIELDS, 2).items()}

    assert found["attention.scale"] == 16.0
    assert (found["attention.softcap"], found["logits.softcap"]) == (50.0, None)
    assert (found["n_kv_heads"], found["norm.kind"]) == (8, "rms")
    assert found["attention.window"] == [4096, None]
    assert found["rope.theta"] == [10000.0, 10000.0]
    assert found["rope.scaling"] == LLAMA_3


def test_modules_may_multiply_the_scale_by_the_number_of_their_layer():
    field, value = knobs_of({**FIELDS, "scale_attn_by_inverse_layer_idx": True}, 3)["attention.scale"]

    assert (field, value) == ("attn_scale, scale_attn_by_inverse_layer_idx", [16.0, 32.0, 48.0])


def test_what_the_config_leaves_to_the_modules_is_not_compared():
    assert "attention.scale" not in knobs_of({**FIELDS, "attn_scale": -1.0}, 2)
    assert "rope.theta" not in knobs_of({**FIELDS, "positional_embedding_type": "standard"}, 2)
    assert knobs_of({**FIELDS, "use_attn_scale": False}, 2)["attention.scale"][1] == 1.0


@pytest.mark.parametrize(
    ("knob", "one", "other", "equal"),
    [
        ("attention.scale", 16, 16.0, True),
        ("attention.scale", 14.966629547095765, 16.0, False),
        ("norm.eps", 1e-5, 1.0000001e-5, True),
        ("norm.eps", 1e-5, 1.1e-5, False),
        ("attention.softcap", None, 50.0, False),
        ("mlp.activation", "gelu_new", "gelu_pytorch_tanh", True),
        ("mlp.activation", "gelu", "gelu_pytorch_tanh", False),
        ("rope.scaling", None, {"rope_type": "default"}, True),
        ("rope.scaling", LLAMA_3, {**LLAMA_3, "factor": 8.0}, False),
        ("rope.scaling", None, LLAMA_3, False),
        ("rope.partial", 64, None, True),
        ("rope.partial", 32, None, False),
        ("attention.window", 4096, 4095, False),
    ],
)
def test_two_values_are_one(knob, one, other, equal):
    assert same(knob, one, other, d_head=64, d_rot=64) is equal


def lint(*args):
    done = CliRunner().invoke(app, ["lint", "--json", *args])
    return done.exit_code, json.loads(done.output)


@pytest.mark.engine
def test_the_release_of_2024_has_the_wrong_scale_in_its_table():
    code, found = lint("--all", "-c", "transformer_lens==2.3.0")
    scales = {
        one["model"]: (one["engine"], one["spec"]) for one in found["departures"] if one["knob"] == "attention.scale"
    }
    bases = {one["model"]: (one["engine"], one["spec"]) for one in found["departures"] if one["knob"] == "rope.theta"}

    assert code == 1
    assert scales.keys() == {f"google/gemma-2-{size}" for size in ("2b", "2b-it", "9b", "9b-it")}
    assert all(pair == (pytest.approx(224**0.5), 16.0) for pair in scales.values())
    assert bases.keys() == {"meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"}
    assert len(found["compared"]) >= 40
    assert len(found["without"]) >= 100


def test_what_transformers_reads_out_of_every_released_config_is_what_the_specs_say():
    code, found = lint("--all", "-c", "hf")

    assert (code, found["departures"], found["without"]) == (0, [], {})
    assert len(found["compared"]) >= 90


@pytest.mark.parametrize("args", [[], ["gpt2", "--all"], ["gpt2", "-c", "spec"], ["nothing-like-it"]])
def test_malformed_questions(args):
    assert CliRunner().invoke(app, ["lint", *args]).exit_code == 2
