"""Text models inside models of images and text: every backend loads the whole checkpoint, and the text model is audited."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import transformers
from wrapped_models import RELEASED, network, save

import parity_audit
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import EnvFailed
from parity_audit.envs.build import python_for
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

pytestmark = pytest.mark.engine
PROBES = ["short", "left_padded", "decode"]
WRONG = {"text_config": {"rms_norm_eps": 1e-3}}


@pytest.fixture(scope="module")
def text(cache):
    """The miniature inside."""
    return miniature.make(resolve_model("gemma-3-1b-it"), root=cache / "synthetic")


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A checkpoint of Gemma3ForConditionalGeneration."""
    return save("gemma3", text, tmp_path_factory.mktemp("wrapped"))


def test_its_clean_ports_are_at_parity(whole, tmp_path):
    before = importlib.util.find_spec("torchvision")
    report = parity_audit.audit(
        str(whole), candidates=["hf,attn_implementation=sdpa", "transformer_lens", "nnsight", "vllm", "spec"], probes=PROBES,
        repair=False, out=tmp_path, limits=False,
    )  # fmt: skip

    assert report.exit_code == 0
    assert [(one.backend, one.findings) for one in report.candidates] == [
        (name, ()) for name in ("hf", "transformer_lens", "nnsight", "vllm", "spec")
    ]
    assert all("images, sound and video" in {gap.what for gap in one.not_tested} for one in report.candidates)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("torchvision") == before  # TransformerLens would install it


def test_a_constant_of_the_text_model_is_named_and_the_patch_says_where_it_is(whole, tmp_path):
    report = parity_audit.audit(
        str(whole), candidates=[f"vllm,hf_overrides={json.dumps(WRONG)}", "hf,rms_norm_eps=1e-3"], probes=PROBES, out=tmp_path,
        limits=False,
    )  # fmt: skip
    vllm, hf = report.candidates

    assert [{finding.knob for finding in one.findings} for one in (vllm, hf)] == [{"norm.eps", "qk_norm.eps"}] * 2
    assert all(one.patched.verdict.value in ("parity", "exact") for one in (vllm, hf))
    assert "hf_overrides={'text_config': {'rms_norm_eps': 1e-06}}" in vllm.patches[0].code
    assert any("model.model.language_model.layers" in patch.code for patch in hf.patches)


def test_a_loaded_model_is_audited_where_it_is(text, whole, tmp_path):
    model = network("gemma3", text)
    report = parity_audit.audit_live(
        model, str(whole), probes="short", repair=False, out=tmp_path / "clean", limits=False
    )
    for layer in model.model.language_model.layers:
        layer.self_attn.scaling *= 2
    wrong = parity_audit.audit_live(
        model, str(whole), probes="short", repair=False, out=tmp_path / "wrong", limits=False
    )

    assert (report.exit_code, report.candidates[0].findings) == (0, ())
    assert {finding.knob for finding in wrong.candidates[0].findings} == {"attention.scale"}


def test_llava_runs_as_what_it_wraps(cache, tmp_path):
    llama = miniature.make(resolve_model("meta-llama/Llama-3.2-1B"), root=cache / "synthetic")
    folder = save("llava", llama, tmp_path / "llava")
    report = parity_audit.audit(
        str(folder), candidates=["transformer_lens"], probes=PROBES, repair=False, out=tmp_path / "out", limits=False
    )

    assert [(one.verdict.value, one.findings) for one in report.candidates] == [("parity", ())]
    with torch.no_grad():
        ids = torch.arange(4, 20)[None]
        alone = transformers.AutoModelForCausalLM.from_pretrained(llama.path)(ids).logits
        assert torch.equal(alone, network("llava", llama)(input_ids=ids).logits)


def test_gemma_3n_is_audited_inside_its_release(cache, tmp_path):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("GEMMA 3N INSIDE ITS RELEASE WAS NOT TESTED: transformers needs timm and torchvision to load it")
    alone = miniature.make(resolve_model("google/gemma-3n-E2B"), root=cache / "synthetic")
    folder = save("gemma3n", alone, tmp_path / "whole")
    report = parity_audit.audit(
        str(folder), candidates=["transformer_lens", "hf,attn_implementation=sdpa,rms_norm_eps=1e-3", "spec"],
        probes=PROBES, repair=False, out=tmp_path / "out", limits=False,
    )  # fmt: skip
    bridge, wrong, formulas = report.candidates

    assert [(one.verdict.value, one.findings) for one in (bridge, formulas)] == [("parity", ())] * 2
    assert {finding.knob for finding in wrong.findings} == {"norm.eps", "qk_norm.eps"}


def test_sglang_numbers_positions_from_one_and_computes_the_same(text, tmp_path):
    try:
        python_for(parse_backend("sglang"))
    except EnvFailed as error:
        pytest.skip(f"SGLANG WAS NOT TESTED: its environment cannot be made here: {error.message}")
    folder = save("gemma3", text, tmp_path / "whole", names=RELEASED)
    report = parity_audit.audit(
        str(folder), candidates=["sglang"], probes=PROBES, repair=False, out=tmp_path / "out", limits=False
    )
    found = report.candidates[0]

    assert (found.verdict.value, found.findings) == ("parity", ())
    said = {gap.site: gap.why for gap in found.not_visible}["blocks.0.rot_q"]
    assert "same function, other positions: positions are shifted by +1 in queries and keys alike" in said
