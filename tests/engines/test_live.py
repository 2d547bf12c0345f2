"""Models that this process has loaded: audited where they are, named where they are wrong, and left as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import parity_audit
from parity_audit.core.errors import UsageError

pytestmark = pytest.mark.engine
MODEL = "meta-llama/Llama-3.2-1B"
PROBE = "short"


@pytest.fixture
def model(llama) -> nn.Module:
    """The miniature as transformers loads it, in training mode and with a hook of the user's own."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(llama.path, attn_implementation="eager")
    loaded.train()
    loaded.seen = []
    loaded.model.layers[0].register_forward_hook(lambda module, given, out: loaded.seen.append(1) or None)
    return loaded


def state(model: nn.Module) -> dict[str, object]:
    """Everything that an audit may not change: objects, numbers, hooks, modes, and the process's generator."""
    return {
        "parameters": {name: id(value) for name, value in model.named_parameters()},
        "numbers": {name: value.detach().double().sum().item() for name, value in model.state_dict().items()},
        "gradients": {name: value.requires_grad for name, value in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "generator": torch.get_rng_state().tolist(),
        "precision": torch.get_float32_matmul_precision(),
    }


def audit(model: object, llama, tmp_path: Path, **more):
    return parity_audit.audit_live(
        model, MODEL, weights=llama.path, probes=PROBE, out=tmp_path / "out", limits=False, **more
    )


def test_a_right_model_is_at_parity_and_left_as_it_was(model, llama, tmp_path):
    before = state(model)
    report = audit(model, llama, tmp_path)

    assert report.exit_code == 0
    assert report.candidates[0].findings == ()
    assert state(model) == before
    assert model.seen  # the user's own hook stayed, and fired
    frame = parity_audit.findings_frame(report)
    assert list(frame["knob"]) == []
    assert "candidate_value" in frame.columns


def test_a_wrong_constant_is_named_patched_and_put_back(model, llama, tmp_path):
    """The RoPE base and a norm's eps, set by hand in the loaded model: the repair is tried on it, and undone again."""
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.05
    wrong = model.model.layers[0].self_attn.scaling
    before = state(model)
    report = audit(model, llama, tmp_path)

    assert report.exit_code == 1
    frame = parity_audit.findings_frame(report)
    assert list(frame["knob"]) == ["attention.scale"]
    assert frame["candidate_value"][0] == pytest.approx(frame["reference_value"][0] / 1.05, rel=1e-3)
    assert bool(frame["patched"][0])
    assert model.model.layers[0].self_attn.scaling == wrong
    assert state(model) == before


def test_a_bridge_and_a_compiled_model(llama, tmp_path):
    """TransformerLens's own object, and what `torch.compile` makes of a model: the model inside is audited."""
    from transformer_lens.model_bridge import TransformerBridge

    inner = transformers.AutoModelForCausalLM.from_pretrained(llama.path, attn_implementation="eager")
    bridge = TransformerBridge.boot_transformers(
        MODEL, hf_model=inner, tokenizer=transformers.AutoTokenizer.from_pretrained(llama.path)
    )
    hooks = {name: len(point.fwd_hooks) for name, point in bridge.hook_dict.items()}
    assert audit(bridge, llama, tmp_path / "bridge").exit_code == 0
    assert {name: len(point.fwd_hooks) for name, point in bridge.hook_dict.items()} == hooks

    compiled = torch.compile(transformers.AutoModelForCausalLM.from_pretrained(llama.path, attn_implementation="eager"))
    assert audit(compiled, llama, tmp_path / "compiled").exit_code == 0


def test_a_model_that_draws_random_numbers_says_so_and_leaves_the_generator_alone(model, llama, tmp_path):
    model.lm_head.register_forward_hook(lambda module, given, out: out + 0.01 * torch.randn_like(out))
    before = state(model)
    report = audit(model, llama, tmp_path)

    assert [finding.knob for finding in report.candidates[0].findings] == ["determinism"]
    assert state(model) == before


def test_a_model_that_raises_is_an_error_of_the_candidate_and_is_left_as_it_was(model, llama, tmp_path):
    def refuse(*_):
        raise RuntimeError("this layer was taken out")

    handle = model.model.layers[1].register_forward_hook(refuse)
    before = state(model)
    report = audit(model, llama, tmp_path)
    handle.remove()

    assert report.exit_code == 3
    assert "this layer was taken out" in report.candidates[0].why
    assert {**state(model), "hooks": before["hooks"]} == before


@pytest.mark.parametrize("model", [None, "gpt2", nn.Identity(), nn.Linear(2, 2, device="meta")])
def test_what_is_no_loaded_model_is_refused(model):
    with pytest.raises(UsageError) as caught:
        parity_audit.audit_live(model, MODEL, miniature="mini")
    assert caught.value.code == "live-model"
