"""Find which other input a projection was given, if its weight is the checkpoint's; see `projections`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, f64, relative_rms
from parity_audit.diagnose.forms.described import described
from parity_audit.diagnose.forms.kinds import CURVES
from parity_audit.diagnose.forms.order import known_orders
from parity_audit.diagnose.forms.pair import ActualExpected
from parity_audit.diagnose.structure.sample import SHARE_LEFT, Answer, Projection, Sample, ends_of

NORMS = ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post")
OTHER_INPUTS = ("resid_pre", "resid_mid", "attn_out", "ln1.out", "ln2.out", "ln1_post.out")


def other_input(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return an answer if the projection is the product of the checkpoint's weight with another site of the block;
    else None."""
    for name in OTHER_INPUTS if projection.output != "attn_proj" else ():
        xy = ends_of(evidence, name, projection.output)
        if xy is None or xy[0].shape != sample.x.shape or torch.equal(xy[0], sample.x):
            continue
        left = relative_rms(sample.unbiased - xy[0] @ sample.weight.T, sample.y)
        if left <= SHARE_LEFT * relative_rms(sample.rest, sample.y):
            return Answer(weight=f"the checkpoint's, of {name}", left=left)
    return None


def given(sample: Sample, projection: Projection, evidence: Evidence) -> Answer | None:
    """Return the changed input whose product with the checkpoint's weight is nearest to y.

    Changed inputs are tried one by one. If none fits and W has at least as many outputs as inputs, the input is
    computed backwards from y and described; None if that has no description.
    """
    y = sample.unbiased
    tries = ((relative_rms(y - x @ sample.weight.T, sample.y), words) for words, x in _inputs(sample.x, evidence))
    left, words = min(tries)
    if left > SHARE_LEFT * relative_rms(sample.rest, sample.y) and sample.weight.shape[0] >= sample.weight.shape[1]:
        found = _backwards(sample, y, evidence.dims["d_head"])
        return None if found is None else Answer(weight=f"the checkpoint's, of inputs with {found[1]}", left=found[0])
    return Answer(weight=f"the checkpoint's, of inputs with {words}", left=left)


def _backwards(sample: Sample, y: Tensor, d_head: int) -> tuple[float, str] | None:
    """Compute the input backwards from y; return the residual of y and a description of how this input differs from
    x."""
    x = torch.linalg.lstsq(sample.weight, y.T).solution.T
    form = described(ActualExpected(own=x, true=sample.x, d_head=d_head))
    if form is None:
        return None
    where = f" ({form.where})" if form.where else ""
    return relative_rms(y - x @ sample.weight.T, sample.y), f"{form.kind} {form.value}{where}"


def _inputs(x: Tensor, evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield changed inputs with their descriptions: x after a curve, of another token, in another channel order, or
    after another norm of the block."""
    yield from ((f"curve {name}", curve(x)) for name, curve in CURVES.items())
    yield from ((f"those of the token {when}", x.roll(step, 0)) for when, step in (("before", 1), ("after", -1)))
    orders = known_orders(x.shape[1], evidence.dims["d_head"])
    yield from ((f"order {words}", x[:, order]) for words, order in orders.items())
    centred = x - x.mean(1, keepdim=True)
    for role in NORMS:
        gain, bias = evidence.weight(role), evidence.weight(f"{role}.bias")
        if gain is None or gain.shape != x.shape[1:]:
            continue
        own = f64(gain) + evidence.spec_number("norm.offset", 0.0)
        for kind, part in (("rms", x), ("layer", centred)):
            normed = part / part.square().mean(1, keepdim=True).sqrt() * own
            yield f"{kind} norm {role.removeprefix('norm.')}", normed if bias is None else normed + f64(bias)
