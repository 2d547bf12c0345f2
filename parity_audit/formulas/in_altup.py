"""The sites of a block with several streams (`altup`), or with a low-rank residual beside attention (`laurel`).

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

from itertools import count, takewhile

import torch
from torch import Tensor

from parity_audit.formulas import altup
from parity_audit.formulas.activations import activation
from parity_audit.formulas.choices import EVERY_STREAM, NOT_FIRST
from parity_audit.formulas.in_norms import normed
from parity_audit.formulas.laurel import low_rank
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.projections import project
from parity_audit.formulas.residual import added


def has_streams(at: FormulaContext) -> bool:
    """Whether a block, or outside the blocks the model, has several streams."""
    return at.has("altup.router") if at.layer is not None else at.has("altup.expand.1")


def has_laurel(at: FormulaContext) -> bool:
    """Whether a block has a low-rank residual beside attention."""
    return at.has("laurel.left")


def active_of(at: FormulaContext, streams: Tensor) -> Tensor:
    """Return the stream that a block computes on, `[batch pos d_model]` of `[batch pos stream d_model]`."""
    return streams[..., int(at.knob("altup.active")), :]


def shown_of(at: FormulaContext, streams: Tensor) -> Tensor:
    """Return the stream that is captured as resid_pre and resid_post, `[batch pos d_model]`.

    It is the active stream by the model's own config, even if a program computes on another one.
    """
    return streams[..., at.dim("active_stream") - 1, :]


def _projections(at: FormulaContext, role: str) -> list[Tensor]:
    """Return the tensors of a role that has one tensor for each stream but the first, in the order of the streams."""
    held = takewhile(at.has, (f"{role}.{stream}" for stream in count(1)))
    return [at.tensor(name) for name in held]


def entering(at: FormulaContext) -> Tensor:
    """Return the streams that enter a block, `[batch pos stream d_model]`."""
    if at.layer:
        return at.site(f"blocks.{at.layer - 1}.altup.post")
    return altup.expanded(at.site("embed"), _projections(at, "altup.expand"), at.knob("altup.least_size"))


def combined(at: FormulaContext) -> Tensor:
    """Return the input of the final norm, combined from the streams that leave the last block, `[batch pos d_model]`."""
    streams = at.site(f"blocks.{at.dim('n_layers') - 1}.altup.post")
    return altup.combined(streams, _projections(at, "altup.combine"), at.knob("altup.least_size"))


def _modalities(at: FormulaContext, x: Tensor) -> Tensor:
    """Return one number per stream, `[batch pos stream]`, computed from one stream x `[batch pos d_model]` (m in `altup`)."""
    read = normed(at, x, "norm.altup") * float(at.knob("altup.router_scale"))
    return activation(at.knob("altup.router"))(project(read, at.tensor("altup.router")))


def predicted(at: FormulaContext) -> Tensor:
    streams = at.site("altup.pre")
    weight = altup.limited(at.tensor("altup.predict"), at.knob("altup.limit"))
    return altup.predicted(streams, _modalities(at, active_of(at, streams)), weight)


def corrected(at: FormulaContext) -> Tensor:
    made = at.site("altup.activated")
    weight = altup.limited(at.tensor("altup.correct"), at.knob("altup.limit"))
    return altup.corrected(
        at.site("altup.predicted"), made, int(at.knob("altup.active")), _modalities(at, made), weight,
        at.knob("altup.share_offset"),
    )  # fmt: skip


def leaving(at: FormulaContext) -> Tensor:
    """Return the streams that leave a block, `[batch pos stream d_model]`.

    The output of the block's per-layer embeddings is added to the streams that `per_layer.streams` names, by default to all but the
    first.
    """
    streams, own = at.site("altup.corrected"), at.site("per_layer.out")
    chosen = torch.ones(streams.shape[-2], dtype=torch.bool, device=streams.device)
    if at.knob("per_layer.streams") != EVERY_STREAM:
        chosen[0 if at.knob("per_layer.streams") == NOT_FIRST else int(at.knob("altup.active"))] = False
    return streams + own.unsqueeze(-2) * chosen.to(streams).unsqueeze(-1)


def read_by_own_embeddings(at: FormulaContext) -> Tensor:
    """Return the input of the per-layer embeddings' gate: the corrected active stream, multiplied by a stored vector.

    The factor is left out if the checkpoint holds no such vector or `altup.output_scale` is False.
    """
    stream = active_of(at, at.site("altup.corrected"))
    factor = at.weight("altup.output_scale")
    return stream if factor is None or at.knob("altup.output_scale") is False else stream * factor


def laurel(at: FormulaContext) -> Tensor:
    """Return what the low-rank residual adds to the stream, `[batch pos d_model]`."""
    y = at.site("ln1.out")
    made = normed(at, low_rank(y, at.tensor("laurel.left"), at.tensor("laurel.right")), "norm.laurel")
    return made if at.knob("laurel.adds_input") is False else y + made


def middle(at: FormulaContext, attention: Tensor) -> Tensor:
    """Return the stream between attention and the MLP, for a block with a low-rank residual.

    `attention` is what attention adds to the stream, `[batch pos d_model]`.
    """
    stream = at.site("altup.active" if has_streams(at) else "resid_pre")
    return added(stream, attention, at.site("laurel.out")) * float(at.knob("laurel.scale"))
