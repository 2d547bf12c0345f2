"""The sites of a linear attention: projections, the convolution, the states of heads, the gated norm.

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas import delta
from parity_audit.formulas.activations import activation
from parity_audit.formulas.choices import UNIT_LENGTH
from parity_audit.formulas.in_heads import at_queries, attention_input
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.projections import heads, project

CONVOLVED, PER_HEAD = "qkv", "ba"
"""The parts that go through the convolution, and the parts that are one number per head."""
PARTS = (*CONVOLVED, "z", *PER_HEAD)
"""The projections of the stream: queries, keys, values, the gate z, the logit b of the correction, the time step a."""


def projected(at: FormulaContext, part: str) -> Tensor:
    """Return the projection of one of `PARTS`, `[batch pos head d]`, or `[batch pos head]` for the parts in `PER_HEAD`.

    Its input is set to 0 at padding, because the convolution would mix padding into the real tokens.
    """
    x = attention_input(at)
    made = project(x * at.batch.mask[..., None].to(x), at.tensor(f"delta.{part}"))
    return made if part in PER_HEAD else heads(made, at.dim("n_key_heads" if part in "qk" else "n_value_heads"))


def read(at: FormulaContext) -> Tensor:
    """Return what each head reads from its state, `[batch pos head d_value]`."""
    q, k, v = _convolved(at)
    eps, scale, count = at.knob("delta.length_eps"), at.knob("delta.scale"), at.dim("n_value_heads")
    divided, (both, _, queries, keys) = at.knob("delta.unit_length"), UNIT_LENGTH
    q = delta.of_unit_length(q, eps) if divided in (both, queries) else q
    k = delta.of_unit_length(k, eps) if divided in (both, keys) else k
    q = q / (q.shape[-1] ** 0.5 if scale is None else scale)
    step = at.tensor("delta.step") if at.knob("delta.step_bias") else torch.zeros(()).to(q)
    kept = delta.kept_share(at.site("delta.a"), at.tensor("delta.rate"), step)
    corrected = torch.sigmoid(at.site("delta.b")) * at.knob("delta.correction")
    made = delta.read_states(
        delta.shared(q, count), delta.shared(k, count), v, kept, corrected, rule=at.knob("delta.rule"),
        chunk=at.knob("delta.chunk"),
    )  # fmt: skip
    return made if at.queries is None else made[:, at.queries]


def _convolved(at: FormulaContext) -> list[Tensor]:
    """Return queries, keys and values after the convolution, whose stored weight holds the channels of all three in this order."""
    sites = [at.site(f"delta.{part}") for part in CONVOLVED]
    flat = [rearrange(x, "batch pos head d -> batch pos (head d)") for x in sites]
    weight = rearrange(at.tensor("delta.conv"), "channel 1 tap -> channel tap")
    parts = torch.split(weight, [x.shape[-1] for x in flat])
    curve, order = activation(at.knob("delta.activation")), at.knob("delta.taps")
    made = [delta.convolved(x, own, curve, order=order) for x, own in zip(flat, parts, strict=True)]
    return [heads(x, site.shape[2]) for x, site in zip(made, sites, strict=True)]


def gated(at: FormulaContext) -> Tensor:
    """Return the input of the output projection, `[batch pos head d_value]`."""
    out = at.site("delta.out")
    gate = activation(at.knob("delta.gate"))(at_queries(at, at.site("delta.z"), out))
    return delta.gated_norm(
        out, gate, at.tensor("norm.delta"), eps=at.knob("delta.norm_eps"), order=at.knob("delta.gate_order")
    )
