"""The judge is in true float64: a basis-permuted checkpoint is the same function, so it must agree to rounding.

Residual basis, MLP neurons and groups of heads are permuted. In float32 the two models differ by rounding;
in true float64 they must agree to 1e-12 relative; a plain `.double()` model does not, because transformers
casts to float32 inside its norms, softmax and rotary.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from parity_audit.backends.float64 import promoted
from parity_audit.core.types import Checkpoint, Probe, SiteTap
from parity_audit.core.wire import FLOAT64, RunRequest

TOKENS = tuple(range(8, 72))
RIGHT = 1e-12


def permuted(checkpoint: Checkpoint, out: Path) -> Path:
    """The same function in another basis."""
    source = Path(checkpoint.path)
    shutil.copytree(source, out)
    weights = load_file(source / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    basis = torch.randperm(weights["model.norm.weight"].numel(), generator=draw)
    groups = torch.randperm(2, generator=draw).flip(0)
    done = {name: _permute(name, value, basis, groups) for name, value in weights.items()}
    save_file({name: value.contiguous() for name, value in done.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def _permute(name: str, value: torch.Tensor, basis: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    if value.ndim == 1:
        return value[basis]
    if "o_proj" in name:
        return rearrange(rearrange(value, "d (g x) -> d g x", g=2)[:, groups], "d g x -> d (g x)")[basis]
    if "down_proj" in name:
        return value.flip(1)[basis]
    value = value[:, basis]
    if "self_attn" in name:
        return rearrange(rearrange(value, "(g x) d -> g x d", g=2)[groups], "g x d -> (g x) d")
    return value.flip(0) if "mlp" in name else value


def logits(path: Path, how: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        if how == "double":
            return model.double()(input_ids=ids).logits
        with promoted(model):
            return model(input_ids=ids).logits


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("name", ["gemma", "llama"])
def test_the_judge_agrees_with_its_permuted_self_and_double_does_not(name, request, tmp_path):
    checkpoint = request.getfixturevalue(name)
    other = permuted(checkpoint, tmp_path / "permuted")
    path = Path(checkpoint.path)

    assert apart(logits(path, "promoted"), logits(other, "promoted")) < RIGHT
    assert apart(logits(path, "double"), logits(other, "double")) > 1000 * RIGHT


@pytest.fixture(scope="module")
def backend(gemma, loaded):
    return loaded(gemma)


def run(backend, tmp_path, **more):
    probe = Probe(name="short", purpose="test", token_ids=(TOKENS,), mask=((1,) * len(TOKENS),))
    taps = (
        SiteTap(site="logits", module="", take="output:0"),
        SiteTap(site="blocks.1.resid_pre", module="model.layers.1", take="input"),
        SiteTap(site="blocks.1.attn_scores", module="model.layers.1.self_attn", take="attention:scores"),
    )
    reply = backend.run(RunRequest(probe=probe, taps=taps, out=str(tmp_path), **more), lambda text: None)
    return {entry.site: load_file(tmp_path / entry.file)["x"] for entry in reply.entries}, reply


def test_watching_changes_no_bit(backend, tmp_path):
    seen, _ = run(backend, tmp_path)
    with torch.no_grad():
        plain = backend.model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits

    assert torch.equal(seen["logits"], plain)


def test_the_judge_leaves_the_weights_as_they_were(backend, tmp_path):
    before = {name: value.clone() for name, value in backend.model.named_parameters()}
    run(backend, tmp_path, precision=FLOAT64)

    assert all(torch.equal(value, before[name]) for name, value in backend.model.named_parameters())
    assert all(value.dtype == torch.float32 for value in backend.model.parameters())


def test_masked_scores_are_minus_infinity(backend, tmp_path):
    seen, reply = run(backend, tmp_path)
    scores = seen["blocks.1.attn_scores"]

    assert torch.equal(scores[0, 0].isneginf(), ~torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril())
    assert all(entry.non_finite == 0 for entry in reply.entries)


def test_a_replay_on_its_own_inputs_changes_nothing(backend, tmp_path):
    first, reply = run(backend, tmp_path / "a", precision=FLOAT64)
    inputs = {entry.site: str(tmp_path / "a" / entry.file) for entry in reply.entries}
    again, _ = run(backend, tmp_path / "b", precision=FLOAT64, inputs=inputs)

    assert apart(again["logits"], first["logits"]) < RIGHT


def test_a_replay_uses_what_it_is_given(backend, tmp_path):
    first, _ = run(backend, tmp_path / "a")
    save_file({"x": first["blocks.1.resid_pre"] * 2}, tmp_path / "other.safetensors")
    moved, _ = run(backend, tmp_path / "b", inputs={"blocks.1.resid_pre": str(tmp_path / "other.safetensors")})

    assert apart(moved["blocks.1.resid_pre"], first["blocks.1.resid_pre"]) == 0.0
    assert apart(moved["logits"], first["logits"]) > 1e-3


class Scaled(torch.nn.Embedding):
    """An embedding as Gemma has it: the table's dtype decides that of the factor."""

    def __init__(self, *args, read_otherwise=False):
        super().__init__(*args, dtype=torch.bfloat16)
        self.scale, self.read_otherwise, self.held = torch.tensor(48.1), read_otherwise, None

    def forward(self, ids):
        self.held = self.weight.dtype
        rows = self.weight[ids] if self.read_otherwise else super().forward(ids)
        return rows * self.scale.to(self.weight.dtype)


@pytest.mark.parametrize("read_otherwise", [False, True])
def test_the_table_of_a_scaled_embedding_is_not_copied_and_what_it_gives_is_float64(read_otherwise):
    torch.manual_seed(0)
    table = Scaled(50, 8, read_otherwise=read_otherwise)
    ids = torch.arange(20)

    with promoted(torch.nn.Sequential(table)), torch.no_grad():
        made = table(ids)

    assert table.held is torch.bfloat16
    assert made.dtype is torch.float64
    assert torch.equal(made, table.weight[ids].double() * table.scale.double())


def test_scores_that_a_model_makes_in_float32_alone_are_in_float64_too():
    """GPT-2's own upcasting refuses scores of any other dtype; it is on again when the judge has run."""
    config = GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=80, attn_implementation="eager",
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = GPT2LMHeadModel(config).eval(), torch.tensor([TOKENS])
    with torch.no_grad():
        native = model(input_ids=ids).logits
        with promoted(model):
            judged = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, native)
        for block in model.transformer.h:
            block.attn.reorder_and_upcast_attn = False
        whole = model.double()(input_ids=ids).logits

    assert apart(whole, judged) < RIGHT
    assert 1e-8 < apart(native, judged) < 1e-5
