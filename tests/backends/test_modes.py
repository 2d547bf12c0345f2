"""What a run leaves out, from the settings that were in force."""

import pytest

from parity_audit.backends.base import REGISTRY
from parity_audit.backends.modes import MODES, not_run


def left_out(kind, **settings):
    return {item.what for item in not_run(kind, settings)}


VLLM = {"enforce_eager": True, "enable_prefix_caching": False, "tensor_parallel_size": 1, "cache_dtype": "auto"}


SERVERS = {"served", "sglang_server"}
"""They answer for log-probabilities alone; their legs say themselves which ways of running were compared."""


def test_every_backend_of_an_audit_has_a_table():
    assert {*REGISTRY, "module"} - {"python"} - SERVERS == MODES.keys()


@pytest.mark.parametrize(
    ("setting", "value", "no_longer", "instead"),
    [
        ("enforce_eager", False, "compiled mode, CUDA graphs", "eager mode"),
        ("enable_prefix_caching", True, "prefix caching", None),
        ("speculative_config", {"method": "ngram"}, "speculative decoding", None),
        ("tensor_parallel_size", 2, "parallel engines", None),
        ("cache_dtype", "fp8", "narrow key-value cache", None),
    ],
)
def test_a_mode_that_was_run_is_not_listed(setting, value, no_longer, instead):
    plain, other = left_out("vllm", **VLLM), left_out("vllm", **{**VLLM, setting: value})

    assert plain - other == {no_longer}
    assert other - plain == ({instead} if instead else set())


def test_what_no_setting_reaches_is_always_listed():
    assert {"hits of the prefix cache", "returned log-probs", "server"} <= left_out("vllm", **VLLM)
    in_every_module = left_out("hf") & left_out("transformer_bridge") & left_out("module")
    assert {"compiled model", "generation loops"} <= in_every_module


@pytest.mark.parametrize(("kernel", "other"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_other_attention_kernels_are_named(kernel, other):
    found = left_out("hf", attn_implementation=kernel)

    assert f"attention kernel {other}" in found
    assert f"attention kernel {kernel}" not in found
    assert "flash and flex attention" in found


def test_the_reason_says_the_setting_in_force():
    why = {item.what: item.why for item in not_run("vllm", VLLM)}

    assert why["prefix caching"] == "this run had enable_prefix_caching=false"
    assert why["speculative decoding"] == "this run had no speculative_config"
    assert all(why.values())
