"""Knob values of released models, from the releases' own documents."""

import math

import pytest

from parity_audit.core.by_layer import by_layer, each_layer
from parity_audit.core.errors import UsageError
from parity_audit.formulas.frequencies import rope_table
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.settings import edits
from parity_audit.specs.shown import show_spec
from parity_audit.specs.view import (
    dims,
    knob_values,
    not_visible,
    reason_not_supported,
    roles,
    spec_values,
    taps,
    unread_tensors,
    weight_taps,
)


def values(name):
    model = resolve_model(name)
    return {knob: known.value for knob, known in knob_values(model.spec, model.config).items()}


@pytest.mark.parametrize(("name", "scale"), [("gemma-2-2b-it", 16.0), ("gemma-2-9b", 16.0), ("gemma-2-27b", 12.0)])
def test_gemma_2_attention_scale(name, scale):
    assert values(name)["attention.scale"] == scale


def test_gemma_2_constants():
    known = values("google/gemma-2-2b-it")

    assert known["attention.softcap"] == 50.0
    assert known["logits.softcap"] == 30.0
    assert known["embed.scale"] == math.sqrt(2304)
    assert known["norm.offset"] == 1.0


def test_gemma_2_windows_are_on_even_layers():
    model = resolve_model("gemma-2-2b")
    assert knob_values(model.spec, model.config)["attention.window"].layers == tuple(range(0, 26, 2))


@pytest.mark.parametrize(
    ("name", "theta", "factor"),
    [("Llama-2-7b", 1e4, None), ("llama-3-8b", 5e5, None), ("Llama-3.1-8B", 5e5, 8.0), ("LLAMA-3.2-1b", 5e5, 32.0)],
)
def test_llama_rotary_constants(name, theta, factor):
    known = values(name)

    assert known["rope.theta"] == theta
    assert (known["rope.scaling"] or {}).get("factor") == factor


@pytest.mark.parametrize(("name", "first"), [("gemma-3n-e2b", 20), ("gemma-4-e2b", 15)])
def test_layers_that_share_keys_read_none_of_their_own(name, first):
    model = resolve_model(name)
    layers = range(first, model.config["num_hidden_layers"])
    parts = ("k_proj", "v_proj", "k_norm")

    unread = unread_tensors(model.spec, model.config)

    assert {f"model.layers.{layer}.self_attn.{part}.weight" for layer in layers for part in parts} <= set(unread)
    assert not [each for each in unread if f".{first - 1}.self_attn." in each]


def test_a_llama_does_without_none_of_its_tensors():
    model = resolve_model("llama-3.2-1b")
    assert unread_tensors(model.spec, model.config) == ()


def test_unknown_model_suggests_the_nearest():
    with pytest.raises(UsageError) as caught:
        resolve_model("gemma-2-2b-itt")
    assert "gemma-2-2b-it" in caught.value.hint


def test_llama3_table_leaves_fast_pairs_and_divides_slow_ones():
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    plain, scaled = rope_table(5e5, None, 64), rope_table(5e5, scaling, 64)

    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 32)
    assert all(p / 32 <= s <= p for p, s in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("backend", ["hf", "hooked_transformer", "transformer_bridge", "vllm"])
@pytest.mark.parametrize("name", ["gemma-2-2b-it", "Llama-3.2-1B"])
def test_every_backend_shows_or_explains_every_site(backend, name):
    model = resolve_model(name)
    reference = {tap.site for tap in taps(model.spec, "hf", model.config, "5.19.0")}

    shown = {tap.site for tap in taps(model.spec, backend, model.config, "")}
    explained = {item.site for item in not_visible(model.spec, backend, model.config, "")}

    assert shown | explained == reference
    assert not shown & explained


@pytest.mark.parametrize("backend", ["hf", "hooked_transformer", "transformer_bridge", "vllm"])
def test_every_backend_shows_every_weight(backend):
    model = resolve_model("gemma-2-2b-it")
    names = {tap.name for tap in weight_taps(model.spec, "hf", model.config, "5.19.0")}
    missing = names - {tap.name for tap in weight_taps(model.spec, backend, model.config, "")}

    assert missing <= {"lm_head.weight"}


def test_a_scaling_patch_uses_the_theta_that_is_being_patched_too():
    model = resolve_model("Llama-3.2-1B")
    made = edits(
        model.spec, "hooked_transformer", "rope.scaling", model.config["rope_scaling"], model.config, "2.8.0",
        {"rope.theta": 500000.0},
    )  # fmt: skip

    assert made is not None
    assert made[0].value["inv_freq"] == rope_table(5e5, model.config["rope_scaling"], 64)


def test_sizes_come_from_the_config():
    model = resolve_model("gemma-2-2b-it")
    assert dims(model.spec, model.config)["d_head"] == 256


def test_an_offset_is_added_to_the_weights_of_every_norm():
    model = resolve_model("gemma-2-2b-it")
    found = edits(model.spec, "hf", "norm.offset", 0.25, model.config, "5.19.0", {})

    assert {edit.op for edit in found} == {"add"}
    assert {edit.value for edit in found} == {0.25 - 1.0}
    assert len(found) == 4 * 26 + 1, "four norms in each block and the last one"
    assert "model.layers[3].pre_feedforward_layernorm.weight" in [edit.path for edit in found]


def test_a_relative_edit_starts_from_the_value_in_force():
    model = resolve_model("llama-3.2-1b")

    def factor(**now):
        return edits(model.spec, "hf", "embed.scale", 3.0, model.config, "5.19.0", {}, **now)[0].value

    assert (factor(), factor(now=2.0)) == (3.0, 1.5)
    assert edits(model.spec, "hf", "embed.scale", None, model.config, "5.19.0", {}) is None, "no setting can be `none`"


def test_norms_of_queries_and_keys_have_an_offset_of_their_own():
    model = resolve_model("gemma-3-1b-it")
    layers = dims(model.spec, model.config)["n_layers"]

    def paths(knob):
        return {edit.path for edit in edits(model.spec, "hf", knob, 0.0, model.config, "5.19.0", {})}

    assert len(paths("qk_norm.offset")) == 2 * layers
    assert not paths("qk_norm.offset") & paths("norm.offset")
    assert len(paths("norm.offset")) == 4 * layers + 1


@pytest.mark.parametrize(
    ("name", "setting"), [("smollm3-3b", "use_rope"), ("exaone-4.0-32b", "is_sliding"), ("llama-4-scout", "use_rope")]
)
def test_one_table_is_set_where_some_layers_rotate_nothing(name, setting):
    """Every fourth layer of these rotates nothing; transformers has one table, of the layers that do, and the family's edits
    of it come first."""
    model = resolve_model(name)
    known = knob_values(model.spec, model.config)
    found = edits(model.spec, "hf", "rope.theta", 20000.0, model.config, "5.19.0", {})

    assert (known["rope.theta"].at(2) is None, known["rope.theta"].at(3) is None) == (False, True)
    assert found[0].path == "model.rotary_emb.inv_freq"
    size = dims(model.spec, model.config)["d_head"]
    assert found[0].value == rope_table(20000.0, known["rope.scaling"].value, size)
    assert found[1].path == "model.rotary_emb.attention_scaling"
    assert [edit.path for edit in found[2:]] == [f"model.layers[*].self_attn.{setting}"]


def test_entries_hold_by_layer():
    model = resolve_model("deepseek-v3")
    own = {tap.site for tap in taps(model.spec, "hf", model.config, "5.19.0")}

    assert {layer for layer in range(61) if f"blocks.{layer}.mlp.pre" in own} == {0, 1, 2}
    assert {layer for layer in range(61) if f"blocks.{layer}.mlp.router_logits" in own} == set(range(3, 61))
    names = {tap.name for tap in weight_taps(model.spec, "hf", model.config, "5.19.0")}
    assert "model.layers.3.mlp.experts.255.up_proj.weight" in names
    assert "model.layers.2.mlp.experts.0.up_proj.weight" not in names


@pytest.mark.parametrize(("name", "module"), [("deepseek-v3", "q_b_proj"), ("moonlight-16b-a3b", "q_proj")])
def test_entries_hold_by_model(name, module):
    model = resolve_model(name)
    own = {tap.site: tap.module for tap in taps(model.spec, "hf", model.config, "5.19.0")}

    assert own["blocks.5.q"] == f"model.layers.5.self_attn.{module}"
    assert ("blocks.5.q_latent" in own) == (name == "deepseek-v3")
    assert roles(model.spec, model.config, 5)["attn.q"].path == f"model.layers.5.self_attn.{module}.weight"
    paths = [edit.path for edit in edits(model.spec, "hf", "qk_norm.eps", 1e-3, model.config, "5.19.0", {})]
    assert any("q_a_layernorm" in path for path in paths) == (name == "deepseek-v3")


def test_deepseek_stretches_the_scale_by_the_square_of_mscale():
    assert values("deepseek-v3")["attention.scale"] == pytest.approx(math.sqrt(192) / (0.1 * math.log(40) + 1) ** 2)
    assert values("moonlight-16b-a3b")["attention.scale"] == math.sqrt(192)


def test_llama_4_rotates_three_of_four_layers_and_lets_queries_grow_in_the_fourth():
    model = resolve_model("llama-4-scout")
    known = knob_values(model.spec, model.config)
    full = [layer for layer in range(48) if layer % 4 == 3]

    assert [layer for layer in range(48) if known["rope.theta"].at(layer) is None] == full
    assert [layer for layer in range(48) if known["attention.chunk"].at(layer) is None] == full
    assert [layer for layer in range(48) if known["attention.temperature_by_position"].at(layer)] == full
    assert known["qk_norm.present"].at(3) == "missing"
    assert known["qk_norm.present"].at(2) == "present"
    assert "qk_norm.present" not in values("llama-4-maverick")


def test_gemma_4_has_sizes_by_layer():
    """The layers that see the whole context have heads twice as large, and fewer keys; their values are their keys."""
    model = resolve_model("google/gemma-4-31B")
    found = {tap.name: tap for tap in weight_taps(model.spec, "vllm", model.config, "0.32.0")}
    cut = {layer: found[f"model.layers.{layer}.self_attn.k_proj.weight"].slice for layer in (4, 5)}

    assert dims(model.spec, model.config)["d_head"] == 256
    assert cut == {4: (32 * 256, 48 * 256), 5: (32 * 512, 36 * 512)}
    assert [roles(model.spec, model.config, layer)["attn.v"].path.split(".")[-2] for layer in (4, 5)] == [
        "v_proj",
        "k_proj",
    ]


def test_gemma_4_rotates_a_quarter_of_a_large_head_as_transformers_does():
    model = resolve_model("google/gemma-4-E2B")
    made = edits(model.spec, "hf", "rope.theta", 5e5, model.config, "5.19.0", {})
    of_full = next(edit.value for edit in made if edit.path.endswith("full_attention_inv_freq"))

    assert len(of_full) == 256
    assert of_full[:64] == pytest.approx([5e5 ** (-2 * pair / 512) for pair in range(64)], rel=1e-12)
    assert set(of_full[64:]) == {0.0}


@pytest.mark.parametrize(
    ("version", "device", "dtype", "runs"),
    [
        ("0.32.0", "cpu", "float32", False),
        ("0.32.0", "cpu", "bfloat16", True),
        ("0.32.0", "cuda:0", "float32", True),
        ("0.40.0", "cpu", "float32", True),
    ],
)
def test_a_release_that_runs_an_architecture_in_one_dtype_on_a_cpu_says_so(version, device, dtype, runs):
    why = reason_not_supported(load_spec("qwen3_next"), "vllm", version, {}, device=device, dtype=dtype)

    assert ("bfloat16 alone" in why) is not runs


@pytest.mark.parametrize(
    ("device", "dtype", "version", "runs"),
    [("cpu", "float32", "0.5.23", False), ("cpu", "bfloat16", "0.5.23", False),
     ("cuda:1", "float32", "0.5.23", True), ("cpu", "float32", "0.5.24", True)],
)  # fmt: skip
def test_what_a_release_cannot_run_on_a_kind_of_device_in_any_dtype(device, dtype, version, runs):
    why = reason_not_supported(load_spec("qwen2_moe"), "sglang", version, {}, device=device, dtype=dtype)

    assert ("triton" in why) != runs


@pytest.mark.parametrize("size", ["alias-gpt2-small-x21", "arwen-gpt2-medium-x21"])
def test_scores_that_are_divided_by_the_number_of_their_layer_have_a_scale_per_layer(size):
    model = resolve_model(size)
    known = knob_values(model.spec, model.config)["attention.scale"]

    assert [known.at(layer) for layer in range(3)] == [8.0, 16.0, 24.0]
    assert spec_values(model.spec, model.config)["attention.scale"] == [
        8.0 * (layer + 1) for layer in range(model.config["n_layer"])
    ]
    (edit,) = edits(model.spec, "hf", "attention.scale", known.value, model.config, "5.19.0", {})
    assert edit.value == [1 / value for value in known.value]
    (edit,) = edits(model.spec, "hf", "attention.scale", 8.0, model.config, "5.19.0", {})
    assert edit.value == 1 / 8.0


def test_a_setting_of_every_layer_takes_a_number_for_each_and_one_of_the_whole_model_does_not():
    model = resolve_model("meta-llama/Llama-3.2-1B")
    by_layer = [8.0 * (layer + 1) for layer in range(model.config["num_hidden_layers"])]

    (edit,) = edits(model.spec, "hf", "attention.scale", by_layer, model.config, "5.19.0", {})
    assert edit.value == [1 / value for value in by_layer]
    gemma = resolve_model("google/gemma-2-2b-it")
    by_layer = [16.0 + layer for layer in range(gemma.config["num_hidden_layers"])]
    assert edits(gemma.spec, "vllm", "attention.scale", by_layer, gemma.config, "0.32.0", {}) is None


def test_one_scale_of_all_layers_is_one_value():
    model = resolve_model("gpt2")
    known = knob_values(model.spec, model.config)["attention.scale"]

    assert (known.value, known.by_layer) == (8.0, False)
    unscaled = {**model.config, "scale_attn_weights": False}
    assert knob_values(model.spec, unscaled)["attention.scale"].value == 1.0


def test_a_value_that_layers_do_not_share_is_shown_with_its_layers():
    shown = {knob: value for knob, value, _ in show_spec("gemma-3-270m").knobs}

    assert shown["rope.theta"] == by_layer({layer: 1e6 if layer % 6 == 5 else 1e4 for layer in range(18)})
    assert {*each_layer(shown["attention.window"]).values()} == {512, None}
    assert shown["attention.scale"] == 16.0
