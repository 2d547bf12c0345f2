"""Diagnoses that no patch can prove are proved on the reference; one that is wrong there is shown to be."""

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LLAMA = "meta-llama/Llama-3.2-1B"
PORTS = Path(__file__).parents[1] / "ports"
PROBES = ("short", "left_padded")
GOOD = (Verdict.EXACT, Verdict.PARITY)

GELU = """
import torch, transformers

def load(model_path: str, dtype: str, device: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).to(device)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    return model
"""

GELU_AND_HEAD = GELU.replace(
    "    return model",
    "    head = model.lm_head\n"
    "    head.forward = lambda x: torch.nn.functional.linear(x.bfloat16(), head.weight.bfloat16()).float()\n"
    "    return model",
)

GELU_AND_CLAMP = GELU.replace(
    "    return model",
    "    value = model.model.layers[1].self_attn.v_proj\n"
    "    inner = value.forward\n"
    "    value.forward = lambda x: inner(x).clamp(-0.5, 0.5)\n"
    "    return model",
)

NOT_CAUSAL = """
import torch, transformers

def load(model_path: str, dtype: str, device: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).to(device)
    inner = model.model.layers[1].self_attn.forward

    def forward(*args, **kwargs):
        return inner(*args, **{**kwargs, "attention_mask": torch.zeros_like(kwargs["attention_mask"])})

    model.model.layers[1].self_attn.forward = forward
    return model
"""

SCALED_TWICE = """
import torch, transformers
from transformers.models.llama import modeling_llama

def load(model_path: str, dtype: str, device: str):
    inner = modeling_llama.eager_attention_forward

    def attention(module, q, k, v, mask, scaling, **more):
        return inner(module, q, k, v, mask, scaling=scaling * module.head_dim**-0.5, **more)

    modeling_llama.eager_attention_forward = attention
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).to(device)
"""


def audit(model, out, *candidates, reference="hf", probes=PROBES, **how):
    report = parity_audit.audit(
        model, reference=reference, candidates=candidates, miniature="mini", out=out, probes=probes, limits=False, **how
    )
    return report.candidates


def site_map_without_knobs(folder):
    text = (PORTS / "plain_llama_sites.yaml").read_text()
    path = folder / "sites.yaml"
    path.write_text(text.partition("\nknobs:")[0] + "\n")
    return path


@pytest.fixture(scope="module")
def wrong_ports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof")
    texts = {
        "gelu": GELU, "gelu_and_head": GELU_AND_HEAD, "scaled_twice": SCALED_TWICE, "gelu_and_clamp": GELU_AND_CLAMP,
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    plain = f"python:{PORTS / 'plain_llama.py'}:load,sites={site_map_without_knobs(folder)}"
    scaled, gelu, both, twice, clamped = f"{plain},scale=9.5", *(f"python:{folder / name}.py:load" for name in texts)
    return audit(LLAMA, folder / "out", scaled, gelu, plain, both, twice, clamped)


def test_a_scale_that_nothing_can_set_is_proved_in_its_layer(wrong_ports):
    """The plain port's layer 1 divides by 9.5, its site map has no knobs: the reference gets 9.5 in layer 1 alone."""
    wrong = wrong_ports[0]

    assert wrong.patched is None
    assert wrong.proof.proven
    assert [(item.knob, item.layers) for item in wrong.proof.imposed] == [("attention.scale", (1,))]
    assert wrong.proof.imposed[0].value == pytest.approx(9.5, rel=1e-4)
    assert wrong.proof.before.max_abs > 1e-3
    assert wrong.proof.after.max_abs < 2e-5
    assert "Not patchable" in wrong.proof.statement
    assert "in layer 1 the reference computes what the candidate computes" in wrong.proof.statement


def test_an_activation_that_only_a_load_sets_is_proved_by_loading_the_reference_with_it(wrong_ports):
    wrong = wrong_ports[1]

    assert [finding.knob for finding in wrong.findings] == ["mlp.activation"]
    assert wrong.proof.proven
    assert wrong.proof.verdict in GOOD


def test_a_mask_that_no_setting_of_the_reference_makes_is_proved_by_the_formula(tmp_path):
    (tmp_path / "port.py").write_text(NOT_CAUSAL)
    (wrong,) = audit(LLAMA, tmp_path / "out", f"python:{tmp_path / 'port.py'}:load", probes=("short",))

    assert [(finding.knob, finding.layers) for finding in wrong.findings] == [("attention.mask", (1,))]
    assert wrong.proof.proven
    assert [(item.knob, item.by, item.layers) for item in wrong.proof.imposed] == [("attention.mask", "formula", (1,))]
    assert wrong.proof.not_imposed == ()
    assert wrong.proof.after.max_abs < 2e-5 < wrong.proof.before.max_abs


def test_the_reference_is_as_before_for_the_next_candidate(wrong_ports):
    right = wrong_ports[2]

    assert right.verdict in GOOD
    assert right.proof is None


SDPA = "hf,attn_implementation=sdpa"


def test_a_reference_that_drops_the_soft_cap_is_replaced_and_nobody_is_patched(tmp_path):
    (right,) = audit("gemma-2-2b-it", tmp_path, "hf", reference=SDPA, probes=("short",))

    assert [finding.departs_from_spec for finding in right.findings] == ["reference"]
    assert right.verdict is Verdict.MISMATCH
    assert right.right_reference.backend == "hf,attn_implementation=eager"
    assert right.right_reference.verified
    assert right.right_reference.verdict is Verdict.EXACT
    assert right.patches == ()
    assert right.proof is None


def test_match_reference_patches_the_candidate_to_drop_it_as_well(tmp_path):
    (right,) = audit("gemma-2-2b-it", tmp_path, "hf", reference=SDPA, probes=("short",), match_reference=True)

    assert [(patch.knob, patch.value) for patch in right.patches] == [("attention.softcap", None)]
    assert right.patched.verdict in GOOD
    assert right.patched.against == ""
    assert right.right_reference is None
    assert right.proof.proven
    assert right.proof.imposed[0].value == 50.0
    assert "spec's value" in right.proof.statement


def test_a_head_in_a_narrow_dtype_that_no_setting_reaches_is_imposed_in_its_formula(wrong_ports):
    both = wrong_ports[3]

    assert {finding.knob for finding in both.findings} == {"mlp.activation", "logits.dtype"}
    assert both.proof.proven
    assert [item.knob for item in both.proof.imposed] == ["mlp.activation", "logits.dtype"]
    assert both.proof.imposed[1].by == "formula"
    assert both.proof.not_imposed == ()


def test_what_the_reference_cannot_be_given_is_set_aside_with_the_reason(wrong_ports):
    """The curve is imposed; clamped values have no setting and no formula."""
    both = wrong_ports[5]

    assert {finding.knob for finding in both.findings} == {"mlp.activation", "v.clamp"}
    assert [item.knob for item in both.proof.imposed] == ["mlp.activation"]
    assert [(item.what, item.why) for item in both.proof.not_imposed] == [
        ("v.clamp in layer 1", "the reference has no setting that says this")
    ]
    assert "Not imposed: v.clamp" in both.proof.statement


def test_a_constant_that_is_folded_in_twice_gets_the_setting_that_makes_up_for_it(wrong_ports):
    """The port divides by 8 of its own accord and by its setting, 8: told to divide by 1 it is right."""
    twice = wrong_ports[4]

    assert [finding.knob for finding in twice.findings] == ["attention.scale"]
    assert twice.findings[0].candidate_value == pytest.approx(64.0, rel=1e-4)
    assert [(patch.knob, patch.value) for patch in twice.patches] == [("attention.scale", 1.0)]
    assert twice.patched.verdict in GOOD
