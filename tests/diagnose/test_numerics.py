"""TF32 as a cause: the size it may have, measured by rounding factors to 10 bits, and what it must not cover."""

import dataclasses

import pytest
import torch

from parity_audit.core.report import SiteDelta
from parity_audit.core.types import Description
from parity_audit.diagnose.numerics import of_that_size, reduced_products, tf32_finding
from parity_audit.repair.choose import ENGINE_EDITS, target_value
from parity_audit.repair.render import render

FULL = {"tf32": False, "float32_matmul_precision": "highest"}
EXACT = Description(backend="hf", package="transformers", version="5", numerics=FULL)
COARSE = dataclasses.replace(EXACT, numerics={"tf32": True, "float32_matmul_precision": "high"})


def tf32(x):
    """float32 numbers with 10 bits of mantissa, rounded to nearest."""
    bits = x.float().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def residual_stream(layers, *, product, gain=1.0, seed=0):
    """What a stack of blocks with seven products each leaves in the residual stream, per layer."""
    draw = torch.Generator().manual_seed(seed)
    width = 192
    stream = torch.randn(40, width, generator=draw)
    out = []
    for _ in range(layers):
        inner = stream / stream.pow(2).mean(-1, keepdim=True).sqrt()
        for _ in range(7):
            weight = torch.randn(width, width, generator=draw) / width**0.5
            inner = product(inner, weight)
        stream = stream + gain * inner
        out.append(stream)
    return out


def deltas(candidate, reference):
    return [
        SiteDelta(
            site=f"blocks.{layer}.resid_post", layer=layer, probe="short", max_abs=float((x - y).abs().max()),
            rmse=float((x - y).square().mean().sqrt()), rel=float((x - y).norm() / y.norm()), noise_ratio=2000.0,
        )
        for layer, (x, y) in enumerate(zip(candidate, reference, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize("layers", [2, 8, 24])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounded_factors_are_of_that_size_and_wrong_constants_are_not(layers, seed):
    exact = residual_stream(layers, product=lambda x, w: x @ w, seed=seed)
    rounded = residual_stream(layers, product=lambda x, w: tf32(x) @ tf32(w), seed=seed)
    wrong = residual_stream(layers, product=lambda x, w: x @ w, gain=1.05, seed=seed)

    assert of_that_size(deltas(rounded, exact))
    assert deltas(rounded, exact)[-1].rel > 1e-4, "the rounding must be there to be named"
    assert not of_that_size(deltas(wrong, exact))


@pytest.mark.parametrize(
    ("about", "device", "dtype", "expected"),
    [
        (EXACT, "cuda", "float32", False),
        (COARSE, "cuda", "float32", True),
        (COARSE, "cuda:1", "float32", True),
        (COARSE, "cpu", "float32", False),
        (COARSE, "cuda", "bfloat16", False),
        (dataclasses.replace(EXACT, numerics={"tf32": False, "float32_matmul_precision": "high"}), "cuda", "float32", True),
    ],
)  # fmt: skip
def test_only_float32_products_on_a_gpu_are_reduced(about, device, dtype, expected):
    assert reduced_products(about, device, dtype) is expected


def test_the_setting_is_the_cause_and_no_side_departs():
    exact = residual_stream(4, product=lambda x, w: x @ w)
    rounded = residual_stream(4, product=lambda x, w: tf32(x) @ tf32(w))
    finding = tf32_finding(COARSE, EXACT, deltas(rounded, exact), device="cuda", dtype="float32")

    assert finding is not None
    assert (finding.knob, finding.kind, finding.departs_from_spec) == ("numerics.tf32", "settings", "neither")
    assert (finding.candidate_value, finding.reference_value) == (True, False)
    assert target_value(finding) is False
    assert tf32_finding(EXACT, COARSE, deltas(exact, rounded), device="cuda", dtype="float32") is None


@pytest.mark.parametrize("backend", ["hf", "hooked_transformer", "transformer_bridge"])
def test_the_printed_patch_switches_it_off(backend):
    torch.backends.cuda.matmul.allow_tf32 = True
    exec(render(ENGINE_EDITS["numerics.tf32"], backend), {})

    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert torch.get_float32_matmul_precision() == "highest"
