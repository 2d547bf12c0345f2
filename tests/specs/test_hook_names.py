"""Hooks under the names that users of TransformerLens type."""

import pytest

from parity_audit.specs.hook_names import hooks
from parity_audit.specs.resolve import resolve_model


def names(model, backend, site):
    resolved = resolve_model(model)
    return {hook.name for hook in hooks(resolved.spec, backend, resolved.config, "3.9.0") if hook.site == site}


@pytest.mark.parametrize("backend", ["hooked_transformer", "transformer_bridge"])
def test_what_is_added_has_one_name_wherever_the_spec_taps_it(backend):
    # BLOOM's and Granite's specs tap another module than the hook that users name.
    for model in ("bloom-560m", "granite-3.0-2b-base"):
        assert names(model, backend, "blocks.2.attn_out") == {"blocks.2.hook_attn_out"}


def test_a_norm_has_its_hooks_where_the_release_has_the_norm():
    # OLMo-2 norms what attention made; HookedTransformer calls that norm ln1, the bridge ln1_post.
    site = "blocks.0.ln1_post.out"
    assert names("OLMo-2-0425-1B", "hooked_transformer", site) == {
        "blocks.0.ln1.hook_scale",
        "blocks.0.ln1.hook_normalized",
    }
    assert "blocks.0.ln1_post.hook_scale" in names("OLMo-2-0425-1B", "transformer_bridge", site)


def test_heads_results_are_asked_for():
    assert names("gpt2", "hooked_transformer", "blocks.1.z") == {"blocks.1.attn.hook_z", "blocks.1.attn.hook_result"}


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_other_backends_have_no_such_names(backend):
    assert names("gpt2", backend, "blocks.1.z") == set()


def test_a_hook_between_rotation_and_norm_promises_neither():
    """Hunyuan normalises behind the rotation: TransformerBridge's hook_rot_q is in front of what the scores read."""
    model = resolve_model("hunyuan-7b-instruct")
    named = {hook.name for hook in hooks(model.spec, "transformer_bridge", model.config, "4.3.0")}

    assert "blocks.0.attn.hook_q" in named
    assert not {"blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_rot_k"} & named


def test_the_output_of_heads_is_right_before_or_behind_its_gate():
    model = resolve_model("qwen3-next")
    found = [
        hook
        for hook in hooks(model.spec, "transformer_bridge", model.config, "4.3.0")
        if hook.name == "blocks.3.attn.hook_z"
    ]

    assert {hook.site for hook in found} == {"blocks.3.z", "blocks.3.z_gated"}
    assert names("qwen3-next", "transformer_bridge", "blocks.3.z") == {"blocks.3.attn.hook_z"}
    assert names("qwen3-next", "transformer_bridge", "blocks.3.z_gated") == {
        "blocks.3.attn.hook_z",
        "blocks.3.attn.hook_result",
    }
