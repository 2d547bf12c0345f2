"""Every form in which a release of transformers writes a config gives the same constants.

The files in saved_configs/ were written by `save_pretrained` of the releases in their names, run on the released configs.
"""

import copy
import json
from pathlib import Path

import pytest
import transformers

from parity_audit.specs import miniature
from parity_audit.specs.canonical import canonical
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.skeleton import skeleton
from parity_audit.specs.view import dims, knob_values

MODELS = [(spec.architecture, spec.first_model) for spec in list_specs()]
SAVED = [
    (path.stem, name, config)
    for path in sorted((Path(__file__).parent / "saved_configs").glob("*.json"))
    for name, config in json.loads(path.read_text()).items()
]
ALWAYS = ("model_type", "architectures", "vocab_size")


def constants(spec, config):
    return knob_values(spec, config), dims(spec, config)


@pytest.mark.parametrize(("release", "name", "config"), SAVED, ids=[f"{item[0]}-{item[1]}" for item in SAVED])
def test_a_config_saved_by_an_older_release(release, name, config):
    model = resolve_model(name)

    assert constants(model.spec, config) == constants(model.spec, model.config)


@pytest.mark.parametrize(("architecture", "name"), MODELS)
def test_a_config_saved_by_the_installed_release(architecture, name, tmp_path):
    model = resolve_model(name)
    transformers.AutoConfig.for_model(**copy.deepcopy(model.config)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())

    assert "rope_theta" not in saved
    assert constants(model.spec, saved) == constants(model.spec, model.config)


@pytest.mark.parametrize(("architecture", "name"), MODELS)
def test_a_config_that_leaves_out_what_is_at_its_default(architecture, name):
    model = resolve_model(name)
    usual = json.loads(transformers.CONFIG_MAPPING[model.config["model_type"]]().to_json_string(use_diff=False))
    short = {key: value for key, value in model.config.items() if key in ALWAYS or usual.get(key, model) != value}

    assert len(short) < len(model.config)
    assert constants(model.spec, short) == constants(model.spec, model.config)


@pytest.mark.parametrize(("architecture", "name"), MODELS)
def test_a_miniature_is_the_same_model_in_both_forms(architecture, name, cache):
    model = resolve_model(name)
    released, saved = (miniature.make(model, size=size, root=cache / "synthetic") for size in ("mini", "resaved"))
    forms = [json.loads((Path(made.path) / "config.json").read_text()) for made in (released, saved)]

    assert "rope_theta" not in forms[1]
    assert constants(model.spec, forms[0]) == constants(model.spec, forms[1])
    files = [(Path(made.path) / "model.safetensors").read_bytes() for made in (released, saved)]
    assert files[0] == files[1]


@pytest.mark.parametrize(("architecture", "name"), MODELS)
def test_a_canonical_config_comes_back_as_it_is(architecture, name):
    once = canonical(resolve_model(name).config)

    assert canonical(once) == once


def test_a_language_model_that_stands_beside_other_modalities():
    inner = {**resolve_model("gemma-3-1b-it").config, "rope_theta": 5e5}
    spec = resolve_model("gemma-3-1b-it").spec
    nested = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}

    assert constants(spec, nested) == constants(spec, inner)
    assert knob_values(spec, nested)["rope.theta"].value == 5e5


def test_the_base_of_the_local_layers_is_read():
    model = resolve_model("gemma-3-1b-it")
    both = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}  # fmt: skip
    config = {key: value for key, value in model.config.items() if not key.startswith("rope_")}
    known = knob_values(model.spec, {**config, "rope_parameters": both})

    assert [known["rope.theta"].at(layer) for layer in range(6)] == [3e4] * 5 + [2e6]
    assert known["rope.scaling"].at(5) == {"rope_type": "linear", "factor": 8.0}
    assert known["rope.scaling"].at(0) is None


@pytest.mark.parametrize("beside", [{"rope_theta": 5e5}, {}])
def test_a_base_inside_the_scaling_holds_as_it_does_for_transformers(beside):
    model = resolve_model("Llama-3.2-1B")
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {key: value for key, value in model.config.items() if not key.startswith("rope_")}
    config |= {"rope_scaling": {**scaling, "rope_theta": 777.0}, **beside}
    known = knob_values(model.spec, config)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config)).rope_parameters

    assert theirs == {**scaling, "rope_theta": 777.0}
    assert known["rope.theta"].value == 777.0
    assert known["rope.scaling"].value == scaling


def test_a_config_is_left_as_it_is_where_transformers_builds_its_modules():
    config = resolve_model("Llama-3.2-1B").config
    before = copy.deepcopy(config)
    skeleton(config)

    assert config == before


def test_layer_types_of_a_config_are_followed():
    model = resolve_model("gemma-2-2b")
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    config = {**model.config, "num_hidden_layers": 3, "layer_types": kinds}

    assert knob_values(model.spec, config)["attention.window"].layers == (2,)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "default"}, None),
        ({"type": "dynamic", "factor": 4.0},
         {"rope_type": "dynamic", "original_max_position_embeddings": 2048, "factor": 4.0}),
    ],
)  # fmt: skip
def test_a_scaling_has_one_form(scaling, expected):
    config = {"model_type": "llama", "max_position_embeddings": 2048, "rope_scaling": scaling}

    assert canonical(config)["rope_scaling"] == expected


@pytest.mark.parametrize(
    "config", [{"rope_scaling": 3}, {"rope_parameters": [1]}, {"model_type": 7}, {"hidden_size": "x"}]
)
def test_what_cannot_be_read_is_left_to_the_check_of_the_config(config):
    assert canonical(config).get("hidden_size") == config.get("hidden_size")


def test_what_layers_have_for_themselves_has_a_place_for_every_layer():
    """transformers writes the number of a layer with as many digits as the last one has."""
    config = {"model_type": "gemma4_text", "num_hidden_layers": 12, "head_dim": 32, "global_head_dim": 64}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4

    own = canonical({**config, "layer_types": kinds})["per_layer_config"]

    assert [layer.get("head_dim") for layer in own] == [None, None, 64] * 4


def test_one_width_stands_for_all_layers_where_the_architecture_has_one_of_each():
    known = resolve_model("google/gemma-3n-E2B")
    one = {**known.config, "intermediate_size": 8192}

    assert canonical(one)["intermediate_size"] == canonical(known.config)["intermediate_size"] == [8192] * 30
    assert constants(known.spec, one) == constants(known.spec, known.config)
