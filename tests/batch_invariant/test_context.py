"""The context: nested, in threads, left by exceptions; outside of it torch is as it was."""

from __future__ import annotations

import importlib.util
import threading

import pytest
import torch
import torch.nn.functional as F

import parity_audit
from parity_audit.batch_invariant import context

GENERATOR = torch.Generator().manual_seed(0)
ROWS, WEIGHT = torch.randn(9, 200, generator=GENERATOR), torch.randn(200, 70, generator=GENERATOR) / 200**0.5


def row_counts() -> bool:
    """Whether the first row alone has the bits that it has among nine."""
    return torch.equal((ROWS[:1] @ WEIGHT)[0], (ROWS @ WEIGHT)[0])


def test_the_mode_is_on_inside_and_off_outside():
    before = ROWS[:1] @ WEIGHT
    with parity_audit.invariant():
        assert row_counts()
        assert not torch.equal(ROWS[:1] @ WEIGHT, before)
    assert torch.equal(ROWS[:1] @ WEIGHT, before)
    assert context._library is None


def test_contexts_nest():
    with parity_audit.invariant():
        with parity_audit.invariant():
            assert row_counts()
        assert row_counts()
    assert not row_counts()


def test_an_exception_leaves_the_mode():
    with pytest.raises(ValueError, match="mine"), parity_audit.invariant():
        raise ValueError("mine")
    assert not row_counts()


def test_a_failed_registration_leaves_nothing(monkeypatch):
    monkeypatch.setattr(context, "CPU", {**context.CPU, "logsumexp": "no function"})
    with pytest.raises(TypeError, match="callable"), parity_audit.invariant():
        pass
    assert context._library is None
    assert context._open == 0
    assert not row_counts()


def test_the_last_thread_to_leave_restores_torch():
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen = {}

    def first():
        with parity_audit.invariant():
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second():
        first_in.wait(10)
        with parity_audit.invariant():
            second_in.set()
            first_out.wait(10)
            seen["second, alone"] = row_counts()

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {"second, alone": True}
    assert not row_counts()


def test_gradients_are_those_of_torch():
    def gradient() -> torch.Tensor:
        rows = ROWS.clone().requires_grad_()
        hidden = F.silu(F.linear(rows, WEIGHT.T, WEIGHT[0])).view(1, 9, 2, 35).transpose(1, 2)
        F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True).log_softmax(
            -1
        ).square().mean().backward()
        return rows.grad

    plain = gradient()
    with parity_audit.invariant():
        found = gradient()
    assert plain.abs().max() > 1e-4
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-6)


def test_an_operation_of_cuda_without_a_kernel_is_an_error_and_no_silent_fall_back():
    kernels = context.cuda_kernels()
    for name in ("var.correction", "_flash_attention_forward", "mm.out", "cumsum"):
        with pytest.raises(parity_audit.CannotRun, match="no batch-invariant kernel for CUDA"):
            kernels[name](ROWS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_a_product_on_cuda_is_an_error():
    with pytest.raises(parity_audit.CannotRun, match="need Triton"):
        context.cuda_kernels()["mm"](ROWS, WEIGHT)
