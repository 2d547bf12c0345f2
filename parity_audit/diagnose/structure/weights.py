"""Find how the weight or bias of a projection differs from the checkpoint's: one function per cause, see
`projections`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn.functional import normalize

from parity_audit.core.limits import TINY
from parity_audit.diagnose.evidence import Evidence, f64, relative_rms
from parity_audit.diagnose.fit.search import Fitted, with_few_digits
from parity_audit.diagnose.structure.sample import LOW, SHARE_LEFT, Answer, Projection, Sample
from parity_audit.diagnose.thresholds import ALIKE, FEWEST_TOKENS, NEAR, SHOWN
from parity_audit.formulas.choices import MISSING, TIMES_OWN
from parity_audit.formulas.rounding import LARGEST_INTEGERS

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCKS = (32, 64, 128)
"""Numbers of inputs that share a scale in 4-bit formats: those of llama.cpp, bitsandbytes and GPTQ."""
SIBLINGS = (("attn.q", "attn.k", "attn.v", "attn.o"), ("mlp.gate", "mlp.up"))


def bias(sample: Sample, projection: Projection, evidence: Evidence) -> Answer:
    """Return the answer that one vector is added for all tokens."""
    extra = sample.rest.mean(0)
    left = relative_rms(sample.rest - extra, sample.y)
    return Answer(bias=_bias_in_words(extra, sample.bias), left=left)


def _bias_in_words(extra: Tensor, known: Tensor | None) -> str:
    if known is None or float(known.norm()) == 0.0:
        return "one that the checkpoint does not have"
    times = 1 + float(extra @ known) / float(known @ known)
    if relative_rms(extra - (times - 1) * known, extra) > NEAR:
        return "another one"
    return MISSING if abs(times) < NEAR else TIMES_OWN.format(f"{times:.4g}")


def scale(sample: Sample, projection: Projection, evidence: Evidence) -> Answer:
    """Return the answer that the product, or the product with the bias, is multiplied by one factor."""
    best = Answer(left=float("inf"))
    for whole, target in ((sample.p, sample.unbiased), (sample.full, sample.y)):
        found = _factor(whole, target, sample.y)
        best = Answer(scale=found.value, left=found.residual) if found.residual < best.left else best
    return best


def _factor(whole: Tensor, target: Tensor, y: Tensor) -> Fitted:
    """Return the factor on `whole` that is nearest to `target`, with few digits, and the residual relative to y."""
    exact, size = float((whole * target).sum() / whole.square().sum()), float(y.norm())
    return with_few_digits(lambda factor: (target - factor * whole) / size, exact, positive=False)


def head_scales(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that each head is multiplied by a factor; None if the outputs have no heads."""
    if not projection.heads:
        return None
    count = evidence.dims[projection.heads]
    full, y = (
        rearrange(value, "token (head d_head) -> token head d_head", head=count) for value in (sample.full, sample.y)
    )
    top = reduce(full * y, "token head d_head -> head", "sum")
    factors = top / reduce(full.square(), "token head d_head -> head", "sum")
    left = relative_rms(y - factors[None, :, None] * full, y)
    odd = {head: float(f"{float(factor):.5g}") for head, factor in enumerate(factors) if abs(float(factor) - 1) > ALIKE}
    return Answer(weight=f"heads scaled: {odd}", left=left)


def row_scales(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that some outputs have a factor: rows of the weight that are zero, or whose scale is
    missing. None if there are none."""
    factors = (sample.p * sample.unbiased).sum(0) / sample.p.square().sum(0).clamp_min(TINY)
    odd = (factors - 1).abs() > ALIKE
    if len(sample.y) < FEWEST_TOKENS or not bool(odd.any()):
        return None
    left = relative_rms(sample.unbiased - torch.where(odd, factors, 1.0) * sample.p, sample.y)
    low, high = (float(f"{float(end):.4g}") for end in (factors[odd].min(), factors[odd].max()))
    even = high - low <= ALIKE * max(abs(high), 1.0)
    words = f"times {high:g}" if even else f"times {low:g} to {high:g}"
    return Answer(weight=f"rows {ranges(odd.nonzero().flatten().tolist())} {words}", left=left)


def other_tensor(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that the weight is another tensor of this block with the same shape, with its bias; else
    None."""
    for role, made in _siblings(sample, projection, evidence):
        if made.shape == sample.y.shape:
            left = relative_rms(sample.y - made, sample.y)
            if left <= SHARE_LEFT * relative_rms(sample.rest, sample.y):
                return Answer(weight=f"those of {role}", left=left)
    return None


def mixed_rows(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that the rows are those of this tensor and its siblings: a fused tensor that was cut in the
    wrong places; else None."""
    made = {projection.role: sample.full, **dict(_siblings(sample, projection, evidence))}
    roles = [role for role, product in made.items() for _ in range(product.shape[1])]
    whole = torch.cat(list(made.values()), 1)
    a, b = (normalize(value, dim=0, eps=TINY) for value in (sample.y, whole))
    best, order = (a.T @ b).max(dim=1)
    if len(made) < 2 or float(best.min()) < 1 - ALIKE:
        return None
    taken = sorted({roles[int(row)] for row in order})
    return Answer(
        weight=f"rows of {' and '.join(taken)}, mixed", left=relative_rms(sample.y - whole[:, order], sample.y)
    )


def _siblings(sample: Sample, projection: Projection, evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield the role and product of the other tensors that read an input of this width, with their biases."""
    for role in next((roles for roles in SIBLINGS if projection.role in roles), ()):
        weight, bias = evidence.weight(role), evidence.weight(f"{role}.bias")
        if role != projection.role and weight is not None and weight.shape[1:] == sample.weight.shape[1:]:
            product = sample.x @ f64(weight).T
            yield role, product if bias is None else product + f64(bias).flatten()


def transposed(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that a square weight is transposed; None if it is not square."""
    if sample.weight.shape[0] != sample.weight.shape[1]:
        return None
    return Answer(weight="transposed", left=relative_rms(sample.unbiased - sample.x @ sample.weight, sample.y))


def permuted(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that the outputs are in another order, with the bias or without it; else None."""
    for made, target in ((sample.p, sample.unbiased), (sample.full, sample.y)):
        a, b = (normalize(value, dim=0, eps=TINY) for value in (target, made))
        best, order = (a.T @ b).max(dim=1)
        if float(best.min()) >= 1 - ALIKE and len(set(order.tolist())) == len(order):
            left = relative_rms(target - made[:, order], sample.y)
            return Answer(weight=_order_in_words(order, projection, evidence), left=left)
    return None


def _order_in_words(order: Tensor, projection: Projection, evidence: Evidence) -> str:
    """Describe an order of rows as one of heads, of the two halves of each head, or of single rows."""
    width = evidence.dims["d_head"]
    if not projection.heads:
        return "outputs permuted"
    heads = order.view(-1, width)
    if bool((heads - heads[:, :1] == torch.arange(width)).all()) and bool((heads[:, 0] % width == 0).all()):
        return f"heads permuted: {(heads[:, 0] // width).tolist()}"
    halves = rearrange(torch.arange(width), "(half pair) -> (pair half)", half=2)
    if bool((heads % width == halves).all()):
        return "rows of each head interleaved (half to adjacent pairs)"
    if bool((heads % width == halves.argsort()).all()):
        return "rows of each head de-interleaved (adjacent to half pairs)"
    return "rows permuted"


def shifted(sample: Sample, projection: Projection, evidence: Evidence) -> Answer:
    """Return the answer that a constant is added to every weight."""
    total = sample.x.sum(1, keepdim=True)
    constant = float((sample.rest.mean(1, keepdim=True) * total).sum() / total.square().sum())
    left = relative_rms(sample.rest - constant * total, sample.y)
    return Answer(weight=f"the checkpoint's plus {constant:.4g}", left=left)


def rounded(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the answer that weights or inputs are rounded to a narrow format: the format with the smallest
    residual."""
    best: Answer | None = None
    for words, x, weight in _rounded_products(sample):
        left = relative_rms(sample.unbiased - x @ weight.T, sample.y)
        if best is None or left < best.left:
            best = Answer(weight=f"the checkpoint's{words}", left=left)
    return best


def _rounded_products(sample: Sample) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the words, the inputs and the weight for each way of rounding: the weight, the inputs, or both."""
    for name, weight in _formats(sample.weight):
        yield f" rounded to {name}", sample.x, weight
    for dtype, _ in LOW:
        name, x = str(dtype).removeprefix("torch."), sample.x.to(dtype).double()
        yield f", times inputs rounded to {name}", x, sample.weight
        yield f" rounded to {name}, as are the inputs", x, sample.weight.to(dtype).double()


def _formats(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each narrow format and the weight rounded to it."""
    for name in ("bfloat16", "float16"):
        yield name, weight.to(getattr(torch, name)).double()
    for dtype in FLOAT8:
        kind = str(dtype).removeprefix("torch.")
        yield kind, weight.to(dtype).double()
        for name, top in _largest(weight):
            step = top / torch.finfo(dtype).max
            yield f"{kind} {name}", (weight / step).to(dtype).double() * step
    for name, top in _largest(weight):
        step = top / LARGEST_INTEGERS["int8"]
        yield f"int8 {name}", (weight / step).round() * step
    for size in BLOCKS:
        if weight.shape[1] % size == 0:
            parts = rearrange(weight, "out (block size) -> out block size", size=size)
            step = (
                reduce(parts.abs(), "out block size -> out block 1", "max").clamp_min(TINY) / LARGEST_INTEGERS["int4"]
            )
            yield f"int4 in blocks of {size}", ((parts / step).round() * step).flatten(1)


def _largest(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and the largest absolute weight of each part that shares a scale, by tensor, row and column."""
    for name, over in (
        ("by tensor", "rows inputs -> 1 1"),
        ("by row", "rows inputs -> rows 1"),
        ("by column", "rows inputs -> 1 inputs"),
    ):
        yield name, reduce(weight.abs(), over, "max").clamp_min(TINY)


def ranges(numbers: list[int]) -> str:
    """Return a sorted list of numbers as text such as `0-3, 7`; only the first spans if there are many."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:SHOWN]]
    return ", ".join(shown) + (" ..." if len(spans) > SHOWN else "")
