"""What hooks should hold and what an edit of one amounts to, against torch's own norms and a projection head by head."""

import pytest
import torch
from torch import nn

from parity_audit.backends.sink import write_site
from parity_audit.capture.store import open_capture, write_manifest
from parity_audit.checks.changes import EDIT_FACTOR, Changes
from parity_audit.checks.promised import ExpectedTensors, norm_input, results
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import FLOAT64, RunRequest
from parity_audit.specs.hook_names import NORMALIZED, SCALE, VALUE, hooks
from parity_audit.specs.resolve import resolve_model

PROBE = Probe(name="short", purpose="test", token_ids=((5, 6, 7, 8),), mask=((1, 1, 1, 1),))
BLOOM = resolve_model("bloom-560m")
EPS, D_MODEL, HEADS = 1e-2, 8, 2
CONFIG = {**BLOOM.config, "hidden_size": D_MODEL, "n_head": HEADS, "n_layer": 2, "layer_norm_epsilon": EPS}


class Plan:
    """A spec, a config, and a checkpoint that holds one norm's weight and bias."""

    def __init__(self, folder, norm):
        from safetensors.torch import save_file

        self.spec, self.config, self.centred = BLOOM.spec, CONFIG, frozenset()
        self.checkpoint = Checkpoint(repo_id="x", path=str(folder))
        name = "transformer.h.1.input_layernorm"
        save_file({f"{name}.weight": norm.weight.data, f"{name}.bias": norm.bias.data}, folder / "model.safetensors")


@pytest.fixture
def norm():
    torch.manual_seed(0)
    made = nn.LayerNorm(D_MODEL, eps=EPS).double()
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


@pytest.fixture
def judge(tmp_path, norm):
    """A capture of one norm's input and output."""
    x = torch.randn(1, 4, D_MODEL, dtype=torch.float64)
    request = RunRequest(probe=PROBE, taps=(), out=str(tmp_path / "judge"), precision=FLOAT64)
    sites = {"blocks.1.resid_pre": x, "blocks.1.ln1.out": norm(x).detach()}
    entries = tuple(write_site(request, site, value, torch.float64) for site, value in sites.items())
    checkpoint = Checkpoint(repo_id="x", path=str(tmp_path))
    write_manifest(
        tmp_path / "judge",
        Manifest(
            backend="judge", dtype="float64", device="cpu", checkpoint=checkpoint, probes=(PROBE,), entries=entries
        ),
    )
    return open_capture(tmp_path / "judge")


def hook(promises):
    every = hooks(BLOOM.spec, "transformer_bridge", CONFIG, "4.3.0")
    return next(item for item in every if item.site == "blocks.1.ln1.out" and item.promises == promises)


def test_a_norms_hooks_have_the_names_that_users_type():
    assert hook(SCALE).name == "blocks.1.ln1.hook_scale"
    assert hook(NORMALIZED).name == "blocks.1.ln1.hook_normalized"


def test_scale_and_normalized_are_those_of_torch(judge, tmp_path, norm):
    promises = ExpectedTensors(judge, PROBE, Plan(tmp_path, norm))
    x = judge.tensor("short", "blocks.1.resid_pre")

    normalized = promises.of(hook(NORMALIZED))()
    assert torch.allclose(normalized * norm.weight + norm.bias, norm(x), atol=1e-12)
    assert torch.allclose(normalized * promises.of(hook(SCALE))(), x - x.mean(-1, keepdim=True), atol=1e-12)


@pytest.mark.parametrize("promises", [SCALE, NORMALIZED])
def test_an_edit_inside_a_norm_is_the_same_edit_of_its_output(judge, tmp_path, norm, promises):
    change = Changes(judge, PROBE, Plan(tmp_path, norm)).at_hook(hook(promises))
    x = judge.tensor("short", "blocks.1.resid_pre")
    edited = change.candidate[hook(promises).name]

    normalized = edited if promises == NORMALIZED else (x - x.mean(-1, keepdim=True)) / edited
    assert torch.allclose(change.judging["blocks.1.ln1.out"], normalized * norm.weight + norm.bias, atol=1e-12)


def test_an_edit_is_large_and_leaves_every_other_position_alone(judge, tmp_path, norm):
    change = Changes(judge, PROBE, Plan(tmp_path, norm)).at_hook(hook(SCALE))
    plain = ExpectedTensors(judge, PROBE, Plan(tmp_path, norm)).of(hook(SCALE))()

    ratio = change.candidate[hook(SCALE).name] / plain
    assert ratio.flatten().tolist() == pytest.approx([1.0, EDIT_FACTOR, 1.0, EDIT_FACTOR])
    assert 0.2 <= EDIT_FACTOR - 1.0 <= 2.0


def test_resid_mid_is_edited_through_what_attention_adds(tmp_path):
    x = {name: torch.randn(1, 4, D_MODEL, dtype=torch.float64) for name in ("resid_pre", "attn_out")}
    x["resid_mid"] = x["resid_pre"] + x["attn_out"]
    request = RunRequest(probe=PROBE, taps=(), out=str(tmp_path / "judge"), precision=FLOAT64)
    entries = tuple(write_site(request, f"blocks.1.{name}", value, torch.float64) for name, value in x.items())
    checkpoint = Checkpoint(repo_id="x", path=str(tmp_path))
    write_manifest(
        tmp_path / "judge",
        Manifest(
            backend="judge", dtype="float64", device="cpu", checkpoint=checkpoint, probes=(PROBE,), entries=entries
        ),
    )
    plan = Plan(tmp_path, nn.LayerNorm(D_MODEL))
    every = hooks(BLOOM.spec, "transformer_bridge", CONFIG, "4.3.0")
    middle = next(item for item in every if item.name == "blocks.1.hook_resid_mid" and item.promises == VALUE)

    change = Changes(open_capture(tmp_path / "judge"), PROBE, plan).at_hook(middle)

    assert torch.allclose(
        x["resid_pre"] + change.judging["blocks.1.attn_out"], change.candidate[middle.name], atol=1e-12
    )


def test_heads_results_sum_to_the_projection():
    torch.manual_seed(0)
    z, weight = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(7, 20, dtype=torch.float64)

    made = results(z, weight)

    assert made.shape == (2, 3, 4, 7)
    assert torch.allclose(made.sum(2), z.flatten(2) @ weight.T, atol=1e-12)
    assert torch.allclose(made[0, 0, 2], weight[:, 10:15] @ z[0, 0, 2], atol=1e-12)


@pytest.mark.parametrize(
    ("site", "held", "expected"),
    [
        ("blocks.1.ln2.out", {"blocks.1.resid_mid", "blocks.1.resid_pre"}, "blocks.1.resid_mid"),
        ("blocks.1.ln2.out", {"blocks.1.resid_pre"}, "blocks.1.resid_pre"),
        ("ln_final.out", {"blocks.3.resid_post"}, "blocks.3.resid_post"),
        ("blocks.1.ln1_post.out", set(), None),
    ],
)
def test_what_a_norm_reads(site, held, expected):
    assert norm_input(site, held, n_layers=4) == expected
