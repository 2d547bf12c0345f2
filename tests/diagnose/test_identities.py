"""Sums of the residual stream: what adds up is silent, in every dtype; what does not is named."""

import pytest
import torch
from held import Held, probe

from parity_audit.diagnose.identities import hook_warnings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stream(dtype=torch.float32, layers=3, parallel=False, seed=0):
    """Blocks that add in `dtype`, as engines do; kept in float32, as captures are."""
    draw = torch.Generator().manual_seed(seed)
    sites, resid = {}, torch.randn(2, 5, 64, generator=draw).to(dtype)
    for layer in range(layers):
        attn, mlp = (0.3 * torch.randn(2, 5, 64, generator=draw).to(dtype) for _ in range(2))
        own = {"resid_pre": resid, "attn_out": attn, "mlp_out": mlp}
        if not parallel:
            own["resid_mid"] = resid + attn
        resid = resid + attn + mlp
        own["resid_post"] = resid
        sites |= {f"blocks.{layer}.{name}": value.float() for name, value in own.items()}
    return sites


def warnings(sites, dtype="float32"):
    return hook_warnings(Held(probe(batch=2, length=5), sites), "a port", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_rounded_sums_are_silent(dtype, parallel, seed):
    assert warnings(stream(DTYPES[dtype], parallel=parallel, seed=seed), dtype) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hook_before_the_multiplier_is_named_with_its_layer(dtype):
    sites = stream(DTYPES[dtype])
    sites["blocks.1.attn_out"] = sites["blocks.1.attn_out"] / 0.8
    (line,) = warnings(sites, dtype)

    assert line.startswith("a port: resid_mid is not resid_pre + attn_out in layer 1 ")
    assert "attn_out is not what is added" in line


def test_one_line_for_all_layers_with_the_worst_of_them():
    sites = stream()
    for layer, factor in ((0, 1.01), (2, 2.0)):
        sites[f"blocks.{layer}.mlp_out"] = sites[f"blocks.{layer}.mlp_out"] * factor
    (line,) = warnings(sites)
    expected = sites["blocks.2.mlp_out"].div(2).norm() / sites["blocks.2.resid_post"].norm()

    assert "layers 0, 2" in line
    assert f"apart by {expected:.2g}" in line


def test_a_parallel_block_is_checked_as_a_whole():
    sites = stream(parallel=True)
    sites["blocks.0.mlp_out"] = sites["blocks.0.mlp_out"] + 0.1

    assert "resid_post is not resid_pre + attn_out + mlp_out in layer 0" in warnings(sites)[0]


def test_what_is_not_shown_is_not_asked():
    sites = stream()
    sites["blocks.1.attn_out"] = sites["blocks.1.attn_out"] * 2
    del sites["blocks.1.resid_mid"], sites["blocks.1.mlp_out"]

    assert warnings(sites) == []


def test_padding_does_not_count():
    padded = probe(batch=2, length=5)
    padded = type(padded)(name="short", purpose="", token_ids=padded.token_ids, mask=((0, 0, 1, 1, 1), (1, 1, 1, 1, 1)))
    sites = stream()
    sites["blocks.0.resid_mid"][0, 1] += 100

    assert hook_warnings(Held(padded, sites), "a port", "float32") == []
