"""Test whether y = x W^T + b holds for a projection with the checkpoint's W and b, and find what holds instead if it
does not.

With a side's own input x `[token, in]` and output y `[token, out]`, and p = x W^T, the causes are:

- scale: y = s p, with s by least squares, for the whole tensor. It is tested before the bias: if a strong attention
  sink makes tokens alike, one vector explains as much as one factor, and the factor is the smaller freedom;
- bias: y - p is one vector for all tokens (added, missing, or a multiple of the checkpoint's);
- head scales: one factor per head (0: a head that is missing);
- rows: one factor per output (0: a row that is missing);
- another input: y = x' W^T for another site x' of the block;
- another tensor: y = x V^T for another checkpoint tensor V of that shape in this block;
- transposed: y = x W, if W is square;
- permuted: every output of y equals another output of p (found by correlation, then checked);
- mixed rows: every output of y is one of p or of a sibling's product (q, k and v, or gate and up, of a fused tensor);
- shifted: y = p + c sum(x), that is, a constant is added to every weight;
- rounded: y = x r(W)^T with r rounding to bfloat16, float16, float8 or integers of 8 and 4 bits;
- changed input: y = x' W^T with x' = x after a curve, after a norm of the block, or in another order; if W has an
  inverse on its outputs, x' is computed backwards and described (`forms`).

Causes are tried from few numbers to many, and the first that leaves only rounding is the answer. If none does, only
causes count that leave little of what the checkpoint's weights leave; of these, the answer is the first that leaves at
most `TIED` times as much as the best one. If there are none, the answer says how large the difference is and in which
outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import EXPLAINED_BY, FORMULA, Evidence, KnobFit, Outcome, f64, relative_rms
from parity_audit.diagnose.structure import inputs, weights
from parity_audit.diagnose.structure.sample import (
    LOW,
    NOT_STORED,
    SHARE_LEFT,
    Answer,
    Projection,
    Sample,
    ends_of,
)
from parity_audit.diagnose.thresholds import CLEAN, MOST_UNEXPLAINED, TIED

PROJECTIONS = (
    Projection(role="attn.q", inputs=("ln1.out",), unnormed=("resid_pre",), output="q", heads="n_heads"),
    Projection(role="attn.k", inputs=("ln1.out",), unnormed=("resid_pre",), output="k", heads="n_kv_heads"),
    Projection(role="attn.v", inputs=("ln1.out",), unnormed=("resid_pre",), output="v", heads="n_kv_heads"),
    Projection(role="attn.gate", inputs=("ln1.out",), unnormed=("resid_pre",), output="attn_gate", heads="n_heads"),
    *(
        Projection(role=name, inputs=("ln1.out",), unnormed=("resid_pre",), output=name, heads=f"n_{whose}_heads")
        for whose, parts in {"key": "qk", "value": "vzba"}.items()
        for name in (f"delta.{part}" for part in parts)
    ),
    Projection(role="attn.o", inputs=("z_gated", "z"), output="attn_proj"),
    Projection(role="mlp.gate", inputs=("ln2.out", "ln1.out"), unnormed=("resid_mid",), output="mlp.pre"),
    Projection(role="mlp.up", inputs=("ln2.out", "ln1.out"), unnormed=("resid_mid",), output="mlp.pre_linear"),
    # In a block with experts beside its MLP, the output of the sublayer is the sum of both, and not this product.
    Projection(role="mlp.down", inputs=("mlp.post",), output="mlp_proj", unless="norm.dense_post"),
    Projection(role="mlp.down", inputs=("mlp.post",), output="mlp.dense"),
    Projection(
        role="moe.router",
        inputs=("ln2_router.out", "ln2.out", "ln1.out"),
        unnormed=("resid_mid",),
        output="mlp.router_logits",
    ),
)


def read(evidence: Evidence) -> list[Outcome]:
    """Return fits of the weight, bias and scale of every projection of a block whose input and output are both
    visible."""
    if evidence.layer is None:
        return []
    found: list[Outcome] = []
    for projection in PROJECTIONS:
        sample = _sample(evidence, projection)
        if sample is not None:
            answer = _explained(sample, projection, evidence)
            found += _fits(evidence, projection, answer, len(sample.x), _rounding(sample.y))
    return found


def _sample(evidence: Evidence, projection: Projection) -> Sample | None:
    """Return the captured input and output of a projection with its weight and bias; None if they are not all visible."""
    # A plain MLP has one input projection; specs give it the role of `up`, and its output is mlp.pre.
    plain = projection.role == "mlp.gate" and evidence.weight("mlp.gate") is None
    role = "mlp.up" if plain else projection.role
    weight = evidence.weight(role)
    if projection.unless and evidence.weight(projection.unless) is not None:
        return None
    if weight is None or weight.ndim != 2 or (role == "attn.v" and evidence.spec_value("attention.v_norm")):
        return None  # after a norm, the captured values are not the product
    bias = evidence.weight(f"{role}.bias")
    normed = evidence.weight("norm.ln1") is not None  # else projections read the stream itself (OLMo 2)
    for name in projection.inputs if normed else (*projection.inputs, *projection.unnormed):
        if name == "z" and evidence.weight("attn.gate") is not None:
            continue  # this projection reads z after the gate
        xy = ends_of(evidence, name, projection.output)
        if xy is not None and xy[0].shape[1] == weight.shape[1] and xy[1].shape[1] == weight.shape[0]:
            x, y = xy
            w = f64(weight)
            return Sample(x=x, y=y, weight=w, bias=None if bias is None else f64(bias).flatten(), p=x @ w.T)
    return None


CAUSES: tuple[Callable[[Sample, Projection, Evidence], Answer | None], ...] = (
    weights.scale, weights.bias, weights.head_scales, weights.row_scales, inputs.other_input,
    weights.other_tensor, weights.transposed, weights.permuted, weights.mixed_rows,
    weights.shifted, weights.rounded, inputs.given,
)  # fmt: skip


def _explained(sample: Sample, projection: Projection, evidence: Evidence) -> Answer:
    """Return the answer for a projection, chosen among the causes as the module's docstring says."""
    by_checkpoint = relative_rms(sample.rest, sample.y)
    if by_checkpoint <= _rounding(sample.y):
        return Answer(left=by_checkpoint)
    tried: list[Answer] = []
    for cause in CAUSES:
        answer = cause(sample, projection, evidence)
        if answer is not None and answer.left <= CLEAN:
            return answer
        tried += (
            [answer] if answer is not None and answer.left <= min(SHARE_LEFT * by_checkpoint, MOST_UNEXPLAINED) else []
        )
    least = min((answer.left for answer in tried), default=0.0)
    nearest = next((answer for answer in tried if answer.left <= TIED * least), None)
    return _different(sample, by_checkpoint) if nearest is None else nearest


def _rounding(y: Tensor) -> float:
    """Return the relative residual that arithmetic may leave in the narrowest dtype that represents y exactly: a
    side that computes in bfloat16 shows only numbers of bfloat16."""
    return next((share for dtype, share in LOW if torch.equal(y.to(dtype).double(), y)), CLEAN)


def _different(sample: Sample, left: float) -> Answer:
    """Return the answer if no cause fits: how large the difference is, and in which outputs."""
    share = sample.rest.norm(dim=0) / sample.y.norm(dim=0).clamp_min(TINY)
    wrong = (share > 10 * CLEAN).nonzero().flatten().tolist()
    where = "all outputs" if len(wrong) == len(share) else f"outputs {weights.ranges(wrong)}"
    return Answer(weight=NOT_STORED, left=left, facts={"differs": f"{left:.3g} of the output, in {where}"})


def _fits(evidence: Evidence, projection: Projection, answer: Answer, n: int, limit: float) -> list[Outcome]:
    """Return the fits of three knobs for a projection (weight, bias, scale), so that the two sides can be compared.

    An answer that leaves at most `limit`, which is rounding, counts as explained by a formula.
    """

    is_made = answer.weight != NOT_STORED and answer.left <= limit
    facts = answer.facts | ({EXPLAINED_BY: FORMULA} if is_made else {})

    def of(knob: str, value: KnobValue, stderr: float | None) -> KnobFit:
        return KnobFit(
            knob=knob, layer=evidence.layer, value=value, stderr=stderr, residual=answer.left, n=n,
            site=projection.output, evidence=facts,
        )  # fmt: skip

    name = bias_knob(projection.role)
    return [
        of(f"weights.{projection.role}", answer.weight, None),
        of(name, answer.bias, None),
        of(f"weights.{projection.role}.scale", answer.scale, max(answer.left / max(n, 1) ** 0.5, 1e-9)),
    ]


def bias_knob(role: str) -> str:
    """Return the knob of a role's bias: `attention.q_bias` for `attn.q`, `mlp.down_bias` for `mlp.down`."""
    family, _, part = role.partition(".")
    return f"{'attention' if family == 'attn' else family}.{part}_bias"
