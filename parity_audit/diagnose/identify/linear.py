"""Projections: does y = x W^T + b hold with the checkpoint's W and b, and if not, what does?

With a side's own input x `[token, in]` and output y `[token, out]`, and p = x W^T:

- bias: y - p is one vector for all tokens (added, missing, a multiple of the checkpoint's);
- scale: y = s p, s by least squares, for the whole tensor or head by head (0: a head that is gone);
- another input: y = x' W^T for another site x' of the block;
- another tensor: y = x V^T for another checkpoint tensor V of that shape in this block;
- transposed: y = x W, where W is square;
- permuted: every output of y equals another output of p (found by correlation, then checked);
- shifted: y = p + c sum(x): every weight has a constant added;
- rounded: y = x r(W)^T with r to bfloat16, float16 or 8-bit integers;
- changed input: y = x' W^T where W has an inverse on its outputs, and x' is x in another form (`forms`: a gate, a norm ...);
- else the difference D of the weights solves x D^T = y - p where there are more tokens than inputs: which rows, how large.

The first in this order that leaves almost nothing of what the checkpoint's weights leave is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, real, relative_rms
from parity_audit.diagnose.forms import described
from parity_audit.diagnose.forms_kinds import CURVES
from parity_audit.diagnose.forms_order import known_orders
from parity_audit.diagnose.forms_pair import Pair

AS_STORED, NOT_STORED = "the checkpoint's", "not the checkpoint's"
CLEAN = 2e-5  # what float32 rounding may leave of a projection, relative
LOW = ((torch.bfloat16, 1e-2), (torch.float16, 1.3e-3))  # and what smaller formats may: a few units in the last place
EXPLAINS = 0.2  # a cause must leave less than this share of what no cause leaves
SURE = 0.999  # correlation of an output with the one it is
WHOLE, PARTS = 1e-6, 8


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One matrix product of a block: where x and y are seen, and the role of its weight."""

    role: str
    inputs: tuple[str, ...]
    output: str
    heads: str = ""


PROJECTIONS = (
    Projection(role="attn.q", inputs=("ln1.out",), output="q", heads="n_heads"),
    Projection(role="attn.k", inputs=("ln1.out",), output="k", heads="n_kv_heads"),
    Projection(role="attn.v", inputs=("ln1.out",), output="v", heads="n_kv_heads"),
    Projection(role="attn.o", inputs=("z",), output="attn_proj"),
    Projection(role="mlp.gate", inputs=("ln2.out", "ln1.out"), output="mlp.pre"),
    Projection(role="mlp.up", inputs=("ln2.out", "ln1.out"), output="mlp.pre_linear"),
    Projection(role="mlp.down", inputs=("mlp.post",), output="mlp_proj"),
    Projection(role="moe.router", inputs=("ln2.out", "ln1.out"), output="mlp.router_logits"),
)
OTHER_INPUTS = ("resid_pre", "resid_mid", "attn_out", "ln1.out", "ln2.out", "ln1_post.out")
SQUARES = {"attn.q": ("attn.o",), "attn.o": ("attn.q",), "attn.k": ("attn.v",), "attn.v": ("attn.k",),
           "mlp.gate": ("mlp.up",), "mlp.up": ("mlp.gate",)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """x, y, the checkpoint's W and b (None where it has none), and the prediction without b."""

    x: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor | None
    p: Tensor

    @property
    def rest(self) -> Tensor:
        """What the checkpoint's weight and bias leave of y."""
        return self.y - self.p if self.bias is None else self.y - self.p - self.bias


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What explains a projection: one of the three knobs departs, or none."""

    weight: KnobValue = AS_STORED
    bias: str = AS_STORED
    scale: float = 1.0
    left: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def fit(evidence: Evidence) -> list[Outcome]:
    """Weights, bias and scale of every projection of a block that can be seen from both ends."""
    if evidence.layer is None:
        return []
    found: list[Outcome] = []
    for projection in PROJECTIONS:
        sample = _sample(evidence, projection)
        if sample is not None:
            found += _fits(evidence, projection, _explained(sample, projection, evidence), len(sample.x))
    return found


def _sample(evidence: Evidence, projection: Projection) -> _Sample | None:
    # A plain MLP has one input projection; specs give it the role of `up`, and its output is mlp.pre.
    plain = projection.role == "mlp.gate" and evidence.weight("mlp.gate") is None
    role = "mlp.up" if plain else projection.role
    weight = evidence.weight(role)
    if weight is None or weight.ndim != 2:
        return None
    bias = evidence.weight(f"{role}.bias")
    for name in projection.inputs:
        xy = _tokens(evidence, name, projection.output)
        if xy is not None and xy[0].shape[1] == weight.shape[1] and xy[1].shape[1] == weight.shape[0]:
            x, y = xy
            w = f64(weight)
            return _Sample(x=x, y=y, weight=w, bias=None if bias is None else f64(bias).flatten(), p=x @ w.T)
    return None


def _tokens(evidence: Evidence, source: str, target: str) -> tuple[Tensor, Tensor] | None:
    """Real tokens of both sites, `[token, width]`, over all short probes."""
    pairs = []
    for probe in evidence.short_probes():
        sites = [evidence.tensor(probe.name, site) for site in (source, target)]
        if None not in sites:
            kept = real(probe)
            pairs.append([f64(site[kept]).flatten(1) for site in sites if site is not None])
    if not pairs:
        return None
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _explained(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer:
    left = relative_rms(sample.rest, sample.y)
    if left <= _rounding(sample.y):
        return _Answer(left=left)
    for cause in (
        _bias,
        _scale,
        _head_scales,
        _other_input,
        _other_tensor,
        _transposed,
        _permuted,
        _shifted,
        _rounded,
        _given,
    ):
        answer: _Answer | None = cause(sample, projection, evidence)
        if answer is not None and answer.left <= max(EXPLAINS * left, CLEAN):
            return answer
    return _different(sample, left)


def _rounding(y: Tensor) -> float:
    """What arithmetic in the format of these numbers may leave: a side that computes in bfloat16 shows only such."""
    return next((share for dtype, share in LOW if torch.equal(y.to(dtype).double(), y)), CLEAN)


Cause = Callable[[_Sample, Projection, Evidence], "_Answer | None"]


def _bias(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer:
    """One vector for all tokens."""
    extra = sample.rest.mean(0)
    left = relative_rms(sample.rest - extra, sample.y)
    return _Answer(bias=_bias_in_words(extra, sample.bias), left=left)


def _bias_in_words(extra: Tensor, bias: Tensor | None) -> str:
    if bias is None or float(bias.norm()) == 0.0:
        return "one that the checkpoint does not have"
    times = 1 + float(extra @ bias) / float(bias @ bias)
    if relative_rms(extra - (times - 1) * bias, extra) > 0.01:
        return "another one"
    return "missing" if abs(times) < 0.01 else f"the checkpoint's times {times:.4g}"


def _scale(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer:
    """One factor on the product, or on product and bias."""
    best = _Answer(left=float("inf"))
    for whole, target in (
        (sample.p, sample.y if sample.bias is None else sample.y - sample.bias),
        (_full(sample), sample.y),
    ):
        factor = float((whole * target).sum() / whole.square().sum())
        left = relative_rms(target - factor * whole, sample.y)
        best = _Answer(scale=factor, left=left) if left < best.left else best
    return best


def _full(sample: _Sample) -> Tensor:
    return sample.p if sample.bias is None else sample.p + sample.bias


def _head_scales(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """A factor for each head."""
    if not projection.heads:
        return None
    count = evidence.dims[projection.heads]
    full, y = (
        rearrange(value, "token (head d_head) -> token head d_head", head=count) for value in (_full(sample), sample.y)
    )
    top = reduce(full * y, "token head d_head -> head", "sum")
    factors = top / reduce(full.square(), "token head d_head -> head", "sum")
    left = relative_rms(y - factors[None, :, None] * full, y)
    odd = {head: float(f"{float(factor):.5g}") for head, factor in enumerate(factors) if abs(float(factor) - 1) > 1e-3}
    return _Answer(weight=f"heads scaled: {odd}", left=left)


def _other_input(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """The product of another site of the block."""
    for name in OTHER_INPUTS if projection.output != "attn_proj" else ():
        xy = _tokens(evidence, name, projection.output)
        if xy is None or xy[0].shape != sample.x.shape or torch.equal(xy[0], sample.x):
            continue
        left = relative_rms(
            sample.y - xy[0] @ sample.weight.T - (0.0 if sample.bias is None else sample.bias), sample.y
        )
        if left <= EXPLAINS * relative_rms(sample.rest, sample.y):
            return _Answer(weight=f"the checkpoint's, of {name}", left=left)
    return None


def _other_tensor(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """Another tensor of this block that has the shape."""
    for role in SQUARES.get(projection.role, ()):
        other = evidence.weight(role)
        if other is not None and other.shape == sample.weight.shape:
            left = relative_rms(sample.y - sample.x @ f64(other).T, sample.y)
            if left <= EXPLAINS * relative_rms(sample.rest, sample.y):
                return _Answer(weight=f"those of {role}", left=left)
    return None


def _transposed(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    if sample.weight.shape[0] != sample.weight.shape[1]:
        return None
    rest = sample.y - sample.x @ sample.weight
    return _Answer(
        weight="transposed", left=relative_rms(rest if sample.bias is None else rest - sample.bias, sample.y)
    )


def _permuted(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """Outputs in another order, with the bias or without it."""
    for made, target in (
        (sample.p, sample.y if sample.bias is None else sample.y - sample.bias),
        (_full(sample), sample.y),
    ):
        a, b = (value / value.norm(dim=0).clamp_min(1e-300) for value in (target, made))
        best, order = (a.T @ b).max(dim=1)
        if float(best.min()) >= SURE and len(set(order.tolist())) == len(order):
            left = relative_rms(target - made[:, order], sample.y)
            return _Answer(weight=_order_in_words(order, projection, evidence), left=left)
    return None


def _order_in_words(order: Tensor, projection: Projection, evidence: Evidence) -> str:
    """An order of rows as a user would say it: heads, halves of a head, or rows."""
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


def _shifted(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer:
    """A constant added to every weight."""
    total = sample.x.sum(1, keepdim=True)
    constant = float((sample.rest.mean(1, keepdim=True) * total).sum() / total.square().sum())
    left = relative_rms(sample.rest - constant * total, sample.y)
    return _Answer(weight=f"the checkpoint's plus {constant:.4g}", left=left)


def _rounded(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """Weights or inputs in a smaller format."""
    bias = 0.0 if sample.bias is None else sample.bias
    best: _Answer | None = None
    for words, x, weight in _rounded_products(sample):
        left = relative_rms(sample.y - x @ weight.T - bias, sample.y)
        if best is None or left < best.left:
            best = _Answer(weight=f"the checkpoint's{words}", left=left)
    return best


def _rounded_products(sample: _Sample) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Weights, inputs, or both in a smaller format: how it is said, and the two factors."""
    for name, weight in _formats(sample.weight):
        yield f" rounded to {name}", sample.x, weight
    for dtype, _ in LOW:
        name, x = str(dtype).removeprefix("torch."), sample.x.to(dtype).double()
        yield f", times inputs rounded to {name}", x, sample.weight
        yield f" rounded to {name}, as are the inputs", x, sample.weight.to(dtype).double()


def _formats(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name in ("bfloat16", "float16"):
        yield name, weight.to(getattr(torch, name)).double()
    for name, axis in (("int8 by row", -1), ("int8 by column", 0)):
        step = weight.abs().amax(dim=axis, keepdim=True).clamp_min(1e-300) / 127
        yield name, (weight / step).round() * step


def _given(sample: _Sample, projection: Projection, evidence: Evidence) -> _Answer | None:
    """The product of something else: found backwards from y, or tried one by one where W has no inverse."""
    y = sample.y if sample.bias is None else sample.y - sample.bias
    if sample.weight.shape[0] < sample.weight.shape[1]:
        left, words = min(
            (relative_rms(y - x @ sample.weight.T, sample.y), words) for words, x in _inputs(sample.x, evidence)
        )
        return _Answer(weight=f"the checkpoint's, of inputs with {words}", left=left)
    given = torch.linalg.lstsq(sample.weight, y.T).solution.T
    form = described(Pair(own=given, true=sample.x, d_head=evidence.dims["d_head"]))
    if form is None:
        return None
    where = f" ({form.where})" if form.where else ""
    left = relative_rms(y - given @ sample.weight.T, sample.y)
    return _Answer(weight=f"the checkpoint's, of inputs with {form.kind} {form.value}{where}", left=left)


def _inputs(x: Tensor, evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"curve {name}", curve(x)) for name, curve in CURVES.items())
    orders = known_orders(x.shape[1], evidence.dims["d_head"])
    yield from ((f"order {words}", x[:, order]) for words, order in orders.items())


def _different(sample: _Sample, left: float) -> _Answer:
    """No simple cause: how large the difference is, and in which outputs."""
    share = sample.rest.norm(dim=0) / sample.y.norm(dim=0).clamp_min(1e-300)
    wrong = (share > max(WHOLE, 10 * CLEAN)).nonzero().flatten().tolist()
    where = "all outputs" if len(wrong) == len(share) else f"outputs {_ranges(wrong)}"
    return _Answer(weight=NOT_STORED, left=left, facts={"differs": f"{left:.3g} of the output, in {where}"})


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7` of a sorted list; the first few where there are many."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:PARTS]]
    return ", ".join(shown) + (" ..." if len(spans) > PARTS else "")


def _fits(evidence: Evidence, projection: Projection, answer: _Answer, n: int) -> list[Outcome]:
    """Three knobs for every projection, so that both sides can be laid side by side."""

    def of(knob: str, value: KnobValue, stderr: float | None) -> KnobFit:
        return KnobFit(
            knob=knob, layer=evidence.layer, value=value, stderr=stderr, residual=answer.left, n=n,
            site=projection.output, evidence=answer.facts,
        )  # fmt: skip

    name = bias_knob(projection.role)
    return [
        of(f"weights.{projection.role}", answer.weight, None),
        of(name, answer.bias, None),
        of(f"weights.{projection.role}.scale", answer.scale, max(answer.left / max(n, 1) ** 0.5, 1e-9)),
    ]


def bias_knob(role: str) -> str:
    """`attention.q_bias` for `attn.q`, `mlp.down_bias` for `mlp.down`."""
    family, _, part = role.partition(".")
    return f"{'attention' if family == 'attn' else family}.{part}_bias"
