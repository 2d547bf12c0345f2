"""The kernels on a CUDA device: models bit for bit, functions of rows, refusals. Not run on a GPU so far."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from batch_invariant.every_site import different, rows, run
from batch_invariant.test_kernels import COUNTS, EPSILON, ROW_FUNCTIONS, randn
from batch_invariant.test_models import CHUNKS, DECODED, LENGTH, MODELS, load

import parity_audit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: no CUDA device for the Triton kernels"),
]
DTYPES = (torch.float32, torch.bfloat16)
ROWWISE = ("softmax", "log_softmax", "logsumexp", "mean", "sum", "rms_norm", "layer_norm")
"""Functions without weights; products are tested in the models."""
POINTWISE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["hf-eager", "hf-sdpa", "bridge"])
def test_every_site_has_the_same_bits_however_it_is_computed(backend, name, dtype, request):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, call, vocabulary = load(backend, request.getfixturevalue(name), dtype)
    model.to("cuda")
    texts = torch.randint(3, vocabulary, (33, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()

    def ways():
        yield rows(run(model, call, texts[[1, 0]], CHUNKS), 1, 2)
        yield run(model, call, texts[:1], DECODED)
        yield rows(run(model, call, texts, ()), 0, 33)

    plain = run(model, call, texts[:1], ())
    with parity_audit.invariant():
        whole = run(model, call, texts[:1], ())
        assert not [name for way in ways() for name in different(way, whole)]
    assert [name for way in ways() for name in different(way, plain)], "no difference that the mode could remove"
    ours, theirs = whole["returned#0"].double(), plain["returned#0"].double()
    assert float((ours - theirs).norm() / theirs.norm()) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*ROWWISE, *POINTWISE])
def test_a_row_is_its_own_and_its_value_that_of_float64(name, dtype):
    function = {**ROW_FUNCTIONS, **POINTWISE}[name]
    values = randn(max(COUNTS), 301, dtype=dtype)

    expected = function(values.double())
    with parity_audit.invariant():
        alone = function(values[:1].cuda())[0]
        for count in COUNTS:
            assert torch.equal(function(values[:count].cuda())[0], alone)
            assert torch.equal(function(values[:count].flip(0).cuda())[-1], alone)
        found = function(values.cuda())
    assert float((found.cpu().double() - expected).abs().max()) <= 32 * EPSILON[dtype] * max(
        1.0, float(expected.abs().max())
    )


def test_what_has_no_kernel_is_an_error():
    values = torch.randn(4, 6, device="cuda")
    with parity_audit.invariant():
        for ask in (lambda: values.cumsum(-1), lambda: values.var(-1), lambda: values.prod(-1)):
            with pytest.raises(parity_audit.CannotRun, match="no batch-invariant kernel"):
                ask()
