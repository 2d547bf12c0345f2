"""A model that no spec lists is asked for on the hub; every way that can end is said. The hub here is a local server."""

import json
import os
import subprocess
import sys

import pytest
from hub_stand_in import Repository, serving

CONFIGS = {"somebody/fine-tuned": {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
           "rms_norm_eps": 3e-5, "hidden_act": "silu", "rope_theta": 12345.0}}  # fmt: skip


@pytest.fixture
def hub():
    files = {name: Repository(files={"config.json": json.dumps(config).encode()}) for name, config in CONFIGS.items()}
    with serving(files) as address:
        yield address


def shown(model, tmp_path, **environ):
    command = [sys.executable, "-m", "parity_audit", "specs", "show", model]
    given = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **environ}
    return subprocess.run(command, capture_output=True, text=True, env=given, timeout=120)


def test_the_config_of_an_unlisted_model_comes_from_the_hub(hub, tmp_path):
    done = shown("somebody/fine-tuned", tmp_path, HF_ENDPOINT=hub)

    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    assert "12345.0" in done.stdout
    assert shown("somebody/fine-tuned", tmp_path, HF_HUB_OFFLINE="1").stdout == done.stdout, "it was not kept"


@pytest.mark.parametrize(
    ("model", "environ", "says"),
    [
        ("google/gemma-2-2b-itt", {"HF_HUB_OFFLINE": "1"}, ["unknown model", "offline mode", "`google/gemma-2-2b-it`"]),
        ("google/gemma-2-2b-itt", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["no spec lists it", "could not be reached"]),
        ("google/gemma-2-2b-itt", {}, ["the hub does not know it either", "`google/gemma-2-2b-it`"]),
        ("no/such/id", {}, ["not a hub id"]),
    ],
)
def test_an_unknown_model_says_what_the_hub_said(model, environ, says, hub, tmp_path):
    done = shown(model, tmp_path, **{"HF_ENDPOINT": hub, **environ})

    assert done.returncode == 2
    assert [text for text in says if text not in " ".join(done.stderr.split())] == []
