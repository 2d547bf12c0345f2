"""Each kernel: the bits of one row at every number of rows, width and number of threads; its value against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import parity_audit
from parity_audit.batch_invariant import agreement, batched, elementwise, products

COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 17, 33, 64, 65)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def first_row_is_its_own(compute: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Row 0 at every count and number of threads, and moved to the last place."""
    expected = compute(rows[:1])[0]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in COUNTS:
            if not torch.equal(compute(rows[:count].clone())[0], expected):
                return False
            if not torch.equal(compute(rows[:count].flip(0))[-1], expected):
                return False
    return True


ROW_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, randn(70, x.shape[1], dtype=x.dtype, seed=1)),
    "linear with bias": lambda x: F.linear(
        x, randn(70, x.shape[1], dtype=x.dtype, seed=1), randn(70, dtype=x.dtype, seed=2)
    ),
    "matmul": lambda x: x @ randn(x.shape[1], 33, dtype=x.dtype, seed=1),
    "matmul, strided batch": lambda x: (torch.stack((x, x), 1)[:, :1] @ randn(x.shape[1], 33, dtype=x.dtype, seed=1))[
        :, 0
    ],
    "einsum": lambda x: torch.einsum("bd,hdk->bhk", x, randn(3, x.shape[1], 8, dtype=x.dtype, seed=1)),
    "addmm": lambda x: torch.addmm(
        randn(33, dtype=x.dtype, seed=2), x, randn(x.shape[1], 33, dtype=x.dtype, seed=1), beta=0.5, alpha=2
    ),
    "mv": lambda x: torch.mv(x, randn(x.shape[1], dtype=x.dtype, seed=1)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_a_row_is_its_own(name, dtype):
    with parity_audit.invariant():
        assert first_row_is_its_own(ROW_FUNCTIONS[name], randn(max(COUNTS), 301, dtype=dtype))


@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_without_the_mode_a_row_is_not_its_own(name):
    assert not first_row_is_its_own(ROW_FUNCTIONS[name], randn(max(COUNTS), 301))


def test_without_the_mode_silu_differs_in_the_rest_of_a_vector():
    rows = randn(1000, 13)

    def alone_as_together() -> bool:
        together = F.silu(rows)
        return all(torch.equal(F.silu(row), expected) for row, expected in zip(rows, together, strict=True))

    assert not alone_as_together()
    with parity_audit.invariant():
        assert alone_as_together()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_a_value_is_that_of_float64(name, dtype):
    rows = randn(5, 301, dtype=dtype)
    expected = ROW_FUNCTIONS[name](rows.double())
    if name in ("linear", "linear with bias", "matmul", "matmul, strided batch", "einsum", "addmm", "mv"):
        size = 4 * math.sqrt(301)  # of sums of 301 products, four standard deviations
    else:
        size = max(1.0, float(expected.abs().max()))
    with parity_audit.invariant():
        found = ROW_FUNCTIONS[name](rows)
    assert found.dtype == dtype
    # sums of 301 terms in random order lose less than 32 units in the last place; low dtypes sum in float32
    assert float((found.double() - expected).abs().max()) <= 32 * EPSILON[dtype] * size


def test_one_long_row_does_not_depend_on_threads():
    row = randn(1, 70_001)
    with parity_audit.invariant():
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.stack((row.sum(-1), row.mean(-1), row.logsumexp(-1))))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_attention_is_the_same_in_one_piece_in_chunks_and_token_by_token(kind, dtype):
    length, ends = 300, (1, 2, 16, 127, 128, 129, 256, 257, 299, 300)
    q, k, v = (randn(2, 3, length, 80, dtype=dtype, seed=seed) for seed in range(3))

    def attend(batch: slice, start: int, stop: int) -> Tensor:
        later = torch.ones(stop - start, stop, dtype=torch.bool).triu(start + 1)
        keys, values, queries = k[batch, :, :stop], v[batch, :, :stop], q[batch, :, start:stop]
        if kind == "sdpa":
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=~later)
        scores = (queries @ keys.transpose(2, 3) / math.sqrt(80)).masked_fill(later, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(dtype) @ values

    with parity_audit.invariant():
        whole = attend(slice(0, 2), 0, length)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for stop in ends:
                assert torch.equal(attend(slice(0, 2), stop - 1, stop), whole[:, :, stop - 1 : stop])
                assert torch.equal(attend(slice(1, 2), 0, stop), whole[1:, :, :stop])
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    expected = ((q.double() @ k.double().mT) / math.sqrt(80)).masked_fill(later, -math.inf).softmax(-1) @ v.double()
    # float32 sums; the eager pattern is rounded to its dtype, once more than the result
    assert float((whole.double() - expected).abs().max()) <= 32 * EPSILON[dtype] * float(expected.abs().max())


def test_attention_keeps_the_meaning_of_its_arguments():
    q, k, v = randn(2, 6, 20, 16), randn(2, 2, 20, 16, seed=1), randn(2, 2, 20, 24, seed=2)
    mask = randn(2, 1, 20, 20, seed=3)
    allowed = mask > 0
    allowed[0, :, 4] = False  # a query without keys: zeros
    for arguments in (
        {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": allowed}, {"attn_mask": mask[:, :, :1], "scale": 0.3}
    ):  # fmt: skip
        plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **arguments)
        with parity_audit.invariant():
            found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **arguments)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_one_call_does_not_agree_the_definition_gives_the_same_bits(dtype, monkeypatch):
    rows, weight = randn(11, 150, dtype=dtype), randn(150, 40, dtype=dtype, seed=1)
    left, right = randn(2, 5, 150, dtype=dtype), randn(2, 150, 20, dtype=dtype, seed=1)
    fast = products.mm(rows, weight), batched.bmm(left, right)
    monkeypatch.setattr(products, "chosen", lambda key, ways, definition, compare: definition)
    monkeypatch.setattr(batched, "chosen", lambda key, ways, definition, compare: definition)
    slow = products.mm(rows, weight), batched.bmm(left, right)
    for quick, defined in zip(fast, slow, strict=True):
        assert torch.equal(quick, defined)


def test_the_comparison_notices_another_order_of_a_sum_in_bfloat16():
    weight = randn(512, 64, dtype=torch.bfloat16)
    rows = agreement.cancelling(16, weight)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    assert agreement.same_bits(products.mm(rows, weight), products.mm(rows, weight)) is True
    assert agreement.same_bits(products.mm(rows[:, order], weight[order]), products.mm(rows, weight)) is False


@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_the_comparison_notices_products_that_are_rounded_before_they_are_added(count, monkeypatch):
    """The rest of a division by a library's tile may be computed by a kernel without fused multiply-adds (MKL with AVX2)."""

    def summed(fused: bool) -> Callable[..., Tensor]:
        def way(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
            total = rows.new_zeros(rows.shape[0], weight.shape[1])
            for x, w in zip(rows.T, weight, strict=True):
                product = x[:, None].double() * w.double()
                total = (total.double() + (product if fused else product.float().double())).float()
            return total

        return way

    monkeypatch.setattr(products, "_row_by_row", summed(fused=True))
    weight = randn(301, 33, seed=1)
    assert products._compare(summed(fused=True), count, None, weight, 0, 1) is True
    assert products._compare(summed(fused=False), count, None, weight, 0, 1) is False


def test_what_shows_no_order_of_sums_is_not_remembered():
    zero = torch.zeros(4, 4)
    assert agreement.same_bits(zero, zero) is None
    assert agreement.same_bits(torch.full((4, 4), math.nan), torch.full((4, 4), math.nan)) is None
    calls = []

    def compared(answer: bool | None) -> Callable[..., bool | None]:
        return lambda way: calls.append(way) or answer

    for answer, picked, number in ((None, batched.bmm, 2), (False, batched.bmm, 1), (True, products.mm, 1)):
        calls.clear()
        for _ in range(2):
            key = ("of this test", answer)
            assert agreement.chosen(key, (products.mm,), batched.bmm, compared(answer)) is picked
        assert len(calls) == number


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_thread_gets_whole_vectors(threads):
    for count in (1, 63, 64, 65, 32768, 32769, 70_000, 100_001, 1_000_003):
        size = elementwise.whole_vectors(count, threads)
        assert count <= size < count + 64 * threads * threads
        for shares in {
            min(threads, -(-size // 32768)),
            threads if size > 16384 else 1,
        }:  # as torch divides; as its GELU
            assert -(-size // shares) % 64 == 0


def test_empty_scalar_and_integer_tensors_are_as_in_torch():
    def results() -> list[Tensor]:
        a, b = randn(4, 3, 5), torch.arange(6)
        return [
            torch.empty(0, 3) @ randn(3, 2), randn(2, 0) @ torch.empty(0, 3), torch.empty(2, 0, 3) @ randn(2, 3, 2),
            torch.tensor(2.0).softmax(0), torch.tensor(2.0).log_softmax(0), torch.empty(0, 3).softmax(-1),
            torch.empty(0, 3).mean(-1), b.view(2, 3) @ b.view(3, 2), b.view(2, 3).sum(-1), torch.exp(b), (b > 2).sum(-1),
            randn(3) @ randn(3), randn(3) @ randn(2, 3, 4), randn(2, 4, 3) @ randn(3), randn(2, 3) @ a,
            randn(4, 1, 2, 3) @ randn(5, 3, 2), a.softmax(1), a.log_softmax(0), a.sum((0, 2)), a.mean(1, keepdim=True),
            a.mean(-1, keepdim=True), a.mean(), a.logsumexp(0, keepdim=True), a.logsumexp((0, 2)),
            torch.full((2, 3), -math.inf).logsumexp(-1), torch.full((2, 3), -math.inf).softmax(-1),
        ]  # fmt: skip

    plain = results()
    with parity_audit.invariant():
        found = results()
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
