"""Triton kernels: every program computes one tile of a fixed size and adds its terms in a fixed order.

The number of programs depends on the size of the batch; the order of the sums within a program does not. Triton must not
compile different kernels for different numbers of rows, columns and keys, so these arguments are not specialised, and callers
use the same memory layout for every batch: one compiled kernel serves all sizes. float32 products are not rounded to TF32.
Kernels are launched without fusing separate multiplications and additions, because the compiler chooses which it fuses.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiplied(left, right, total, WIDEN: tl.constexpr, DOUBLE: tl.constexpr):
    """Return `total + left @ right` for one tile.

    float64 products are computed as sums of elementwise products, because not every device has a float64 `tl.dot`.
    """
    if DOUBLE:
        return total + tl.sum(left[:, :, None] * right[None, :, :], axis=1)
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float32)


@triton.jit(do_not_specialize=["rows", "columns", "out_batch", "out_row"])
def product(
    left, right, out, rows, columns, terms, left_batch, left_row, left_term, right_batch, right_term, right_column,
    out_batch, out_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, WIDEN: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """Compute one tile `[ROWS, COLUMNS]` of one product of a batch, adding `TERMS` terms at a time in ascending order."""
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tile % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64 if DOUBLE else tl.float32)
    for start in range(0, terms, TERMS):
        term = start + tl.arange(0, TERMS)
        a = tl.load(
            left + batch * left_batch + row[:, None] * left_row + term[None, :] * left_term,
            mask=(row[:, None] < rows) & (term[None, :] < terms), other=0.0,
        )  # fmt: skip
        b = tl.load(
            right + batch * right_batch + term[:, None] * right_term + column[None, :] * right_column,
            mask=(term[:, None] < terms) & (column[None, :] < columns), other=0.0,
        )  # fmt: skip
        total = multiplied(a, b, total, WIDEN, DOUBLE)
    tl.store(
        out + batch * out_batch + row[:, None] * out_row + column[None, :], total.to(out.dtype.element_ty),
        mask=(row[:, None] < rows) & (column[None, :] < columns),
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def row_sum(values, out, width, BLOCK: tl.constexpr):
    """Compute the sum of one row, block after block, in the dtype of `out`."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.sum(tl.zeros((BLOCK,), dtype=out.dtype.element_ty), axis=0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = tl.load(values + row * width + place, mask=place < width, other=0)
        total += tl.sum(one.to(out.dtype.element_ty), axis=0)
    tl.store(out + row, total)


@triton.jit(do_not_specialize=["width"])
def row_softmax(values, out, width, LOG: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the softmax of one row, or its logarithm if `LOG`, in dtype `WIDE`; exponentials are summed block after block."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.max(tl.full((BLOCK,), float("-inf"), dtype=WIDE), axis=0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = tl.load(values + row * width + place, mask=place < width, other=float("-inf")).to(WIDE)
        peak = tl.maximum(peak, tl.max(one, axis=0))
    total = tl.sum(tl.zeros((BLOCK,), dtype=WIDE), axis=0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = tl.load(values + row * width + place, mask=place < width, other=float("-inf")).to(WIDE)
        total += tl.sum(tl.where(place < width, tl.exp(one - peak), 0.0), axis=0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = tl.load(values + row * width + place, mask=place < width, other=float("-inf")).to(WIDE)
        found = one - peak - tl.log(total) if LOG else tl.exp(one - peak) / total
        tl.store(out + row * width + place, found.to(out.dtype.element_ty), mask=place < width)


@triton.jit
def row_norm(
    values, weight, bias, out, mean, rstd, width, eps, CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute LayerNorm (if `CENTRED`) or RMSNorm of one row.

    The first pass computes the mean (LayerNorm only), the second the mean square of the values minus the mean, and the third
    the normed row.
    """
    row = tl.program_id(0).to(tl.int64)
    wide = rstd.dtype.element_ty
    centre = tl.sum(tl.zeros((BLOCK,), dtype=wide), axis=0)
    if CENTRED:
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            centre += tl.sum(tl.load(values + row * width + place, mask=place < width, other=0.0).to(wide), axis=0)
        centre = centre / width
        tl.store(mean + row, centre)
    square = tl.sum(tl.zeros((BLOCK,), dtype=wide), axis=0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = tl.load(values + row * width + place, mask=place < width, other=0.0).to(wide) - centre
        square += tl.sum(tl.where(place < width, one * one, 0.0), axis=0)
    scale = 1.0 / tl.sqrt(square / width + eps)
    tl.store(rstd + row, scale)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        one = (tl.load(values + row * width + place, mask=place < width, other=0.0).to(wide) - centre) * scale
        if WEIGHT:
            one = one * tl.load(weight + place, mask=place < width, other=0.0).to(wide)
        if BIAS:
            one = one + tl.load(bias + place, mask=place < width, other=0.0).to(wide)
        tl.store(out + row * width + place, one.to(out.dtype.element_ty), mask=place < width)


@triton.jit(do_not_specialize=["heads", "own", "queries", "keys", "mask_batch", "mask_head", "mask_query"])
def attention_split(
    query, key, value, mask, sums, peaks, totals, heads, own, queries, keys, scale, query_row, key_row, value_row, mask_batch,
    mask_head, mask_query, width, value_width, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of `QUERIES` queries of one head to one split of `SPLIT` keys.

    Stores three results per query: the sum of the values weighted by `exp(score - largest score)`, the largest score, and the
    sum of these weights.

    Args:
        heads: number of heads of all sequences together (batch size times `own`).
        own: number of heads of one sequence.
    """
    split = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(queries, QUERIES)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    row = (tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    inner, outer = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    seen = row < queries
    q = tl.load(
        query + (head * queries + row[:, None]) * query_row + inner[None, :],
        mask=seen[:, None] & (inner[None, :] < width), other=0.0,
    )  # fmt: skip
    peak = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    found = tl.zeros((QUERIES, VALUE_WIDTH), dtype=tl.float32)
    for start in range(0, tl.minimum(SPLIT, keys - split * SPLIT), KEYS):
        place = split * SPLIT + start + tl.arange(0, KEYS)
        there = place < keys
        k = tl.load(
            key + (head * keys + place[None, :]) * key_row + inner[:, None],
            mask=there[None, :] & (inner[:, None] < width), other=0.0,
        )  # fmt: skip
        added = tl.load(
            mask + head // own * mask_batch + head % own * mask_head + row[:, None] * mask_query + place[None, :],
            mask=seen[:, None] & there[None, :], other=float("-inf"),
        )  # fmt: skip
        scores = multiplied(q, k, tl.zeros((QUERIES, KEYS), dtype=tl.float32), WIDEN, False) * scale + added
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - finite[:, None])
        before = tl.exp(peak - finite)
        v = tl.load(
            value + (head * keys + place[:, None]) * value_row + outer[None, :],
            mask=there[:, None] & (outer[None, :] < value_width), other=0.0,
        )  # fmt: skip
        total = total * before + tl.sum(weights, axis=1)
        found = multiplied(weights.to(v.dtype), v, found * before[:, None], WIDEN, False)
        peak = highest
    line = (split * heads + head) * queries + row
    tl.store(
        sums + line[:, None] * value_width + outer[None, :], found,
        mask=seen[:, None] & (outer[None, :] < value_width),
    )  # fmt: skip
    tl.store(peaks + line, peak, mask=seen)
    tl.store(totals + line, total, mask=seen)


@triton.jit(do_not_specialize=["lines", "splits"])
def attention_combined(sums, peaks, totals, out, lines, splits, value_width, VALUE_WIDTH: tl.constexpr):
    """Combine the results of all splits of one query in ascending order; a query whose keys are all masked gets zeros."""
    line = tl.program_id(0).to(tl.int64)
    outer = tl.arange(0, VALUE_WIDTH)
    inside = outer < value_width
    peak = tl.load(peaks + line)
    total = tl.load(totals + line)
    found = tl.load(sums + line * value_width + outer, mask=inside, other=0.0)
    for split in range(1, splits):
        at = split * lines + line
        own = tl.load(peaks + at)
        highest = tl.maximum(peak, own)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        before, after = tl.exp(peak - finite), tl.exp(own - finite)
        total = total * before + tl.load(totals + at) * after
        found = found * before + tl.load(sums + at * value_width + outer, mask=inside, other=0.0) * after
        peak = highest
    found = tl.where(total == 0.0, 0.0, found / tl.where(total == 0.0, 1.0, total))
    tl.store(out + line * value_width + outer, found.to(out.dtype.element_ty), mask=inside)
