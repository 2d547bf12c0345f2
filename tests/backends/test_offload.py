"""Models that transformers spreads by a device map: with weights on disk they show what they show in memory.

accelerate's hooks bring a module's weights while it runs. Everything is held to the same model without a map, to the bit.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from architectures import Architecture

from parity_audit.audit.question import check_backends
from parity_audit.backends.paths import assign, get
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import BackendFailed, UsageError
from parity_audit.core.types import Edit
from parity_audit.core.wire import FLOAT64, ApplyRequest, WeightsRequest
from parity_audit.envs.recipes import recipe_for
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.view import weight_taps

ON_DISK = {
    "model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk",
    "model.layers.3": "disk", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip
NORM = "model.layers[0].input_layernorm.weight"
HERE = "5.19.0"


@pytest.fixture(scope="module", params=["meta-llama/Llama-3.2-1B", "gemma-2-2b-it", "mistralai/Mixtral-8x7B-v0.1"])
def model(request, cache, tmp_path_factory):
    return Architecture(resolve_model(request.param), cache, tmp_path_factory.mktemp("offload"))


@pytest.fixture(scope="module")
def spread(model):
    layers = {f"model.layers.{n}" for n in range(model.n_layers)}
    chosen = {part: place for part, place in ON_DISK.items() if part in layers or ".layers." not in part}
    backend = model.loaded({"device_map": chosen})
    assert sum(parameter.is_meta for parameter in backend.model.parameters()) > 10
    assert backend.describe().numerics["placed"]["disk"] == sum(place == "disk" for place in chosen.values())
    return backend


def prints(model, backend):
    taps = weight_taps(model.model.spec, "hf", model.config, HERE)
    return {item.name: item.sha256 for item in backend.weights(WeightsRequest(taps=taps))}


def same(one, other):
    assert one.sites.keys() == other.sites.keys()
    return [site for site in one.sites if not torch.equal(one.sites[site], other.sites[site])]


def test_weights_on_disk_are_fingerprinted_as_those_in_memory(model, spread):
    assert prints(model, spread) == prints(model, model.backend)


def test_sites_are_those_of_the_model_in_memory(model, spread):
    assert same(model.run(spread), model.native) == []


def test_it_judges_in_true_float64(model, spread):
    assert same(model.run(spread, precision=FLOAT64), model.judge) == []


def test_an_edit_of_weights_on_disk_moves_the_model_and_is_undone(model, spread):
    edit = (Edit(op="add", path=NORM, value=0.25),)
    here, there = (backend.apply(ApplyRequest(edits=edit)) for backend in (model.backend, spread))
    moved, expected = model.run(spread), model.run(model.backend)
    told = prints(model, spread) == prints(model, model.backend)
    for backend in (model.backend, spread):
        backend.apply(ApplyRequest(edits=()))

    assert [item.changed for item in there] == [item.changed for item in here] == [True]
    assert told
    assert same(moved, expected) == []
    assert not torch.equal(moved.sites["logits"], model.native.sites["logits"])
    assert same(model.run(spread), model.native) == []
    assert prints(model, spread) == prints(model, model.backend)


def test_what_cannot_be_read_is_an_error_and_no_weight(llama, tmp_path):
    model = Architecture(resolve_model("meta-llama/Llama-3.2-1B"), tmp_path, tmp_path)
    backend = model.loaded({"device_map": ON_DISK})
    with pytest.raises(ValueError, match="as a whole only"):
        assign(backend.model, f"{NORM}[0]", 1.0)
    remove_hook_from_module(get(backend.model, "model.layers[0].input_layernorm"))
    owner = get(backend.model, "model.layers[2].input_layernorm")
    owner._hf_hook.weights_map = {}
    owner.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    get(backend.model, "model.layers[0].input_layernorm").weight = owner.weight

    for layer, said in ((0, "no hook that brings them"), (2, "cannot be read")):
        with pytest.raises(BackendFailed, match=said) as caught:
            get(backend.model, f"model.layers[{layer}].input_layernorm.weight")
        assert caught.value.code == "offloaded-weights"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hf,device_map=autos", "`autos` is not a device_map"),
        ("hf,device_map=auto,tp=2", "exclude each other"),
        ('hf,max_memory={"cpu": "1GB"}', "belongs to a device_map"),
        ("hf,device_map=auto,max_memory=1GB", "a mapping of devices"),
    ],
)
def test_a_map_that_cannot_be_is_refused_before_anything_runs(text, said):
    with pytest.raises(UsageError, match=said):
        check_backends([parse_backend(text)], {"model_type": "llama"})


def test_another_release_gets_accelerate_only_for_a_map():
    plain, mapped = (recipe_for(parse_backend(text)) for text in ("hf==4.50.3", "hf==4.50.3,device_map=auto"))

    assert set(mapped.requirements) - set(plain.requirements) == {"accelerate>=0.26"}
    assert mapped.key != plain.key
