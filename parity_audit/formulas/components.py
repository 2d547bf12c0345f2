"""One function per site, which takes the inputs, tensors and knobs from a `FormulaContext` and computes the site's formula.

The order of computation in a block follows from the checkpoint and two knobs: a norm exists if the checkpoint holds its weight,
`norm.order` says whether sublayers read normalised input, and `residual.parallel` whether the MLP reads what attention reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.formulas import embedding, in_altup, in_delta, in_mixture, in_mlp, per_layer
from parity_audit.formulas.choices import AFTER_SUM, FLOAT32, OF_FIRST, POST, REPEATED
from parity_audit.formulas.in_altup import has_laurel, has_streams
from parity_audit.formulas.in_attention import pattern_of, scores_of, z_of
from parity_audit.formulas.in_heads import (
    LATENTS,
    gate_of,
    gated_heads,
    has_delta,
    head_norm,
    latent_norm,
    latent_of,
    normed_late,
    projected,
    read_by_output,
    read_by_scores,
    reads_of,
)
from parity_audit.formulas.in_mixture import beside_mlp, is_mixture
from parity_audit.formulas.in_mlp import has_gate, hidden, is_parallel
from parity_audit.formulas.in_norms import normed, read_by_norm
from parity_audit.formulas.logits import logits
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.positions import assigned_positions
from parity_audit.formulas.projections import project
from parity_audit.formulas.residual import added

Make = Callable[[FormulaContext], Tensor]


def _embed(at: FormulaContext) -> Tensor:
    dtype = torch.float32 if at.knob("embed.scale_dtype") == FLOAT32 else torch.float64
    return embedding.embed(
        at.batch.tokens, at.stored("embed"), scale=at.knob("embed.scale"), scale_dtype=dtype, dtype=at.decoder.dtype
    )


def _pos_embed(at: FormulaContext) -> Tensor:
    rows = assigned_positions(at.batch, at.knob("pos_embed.offset"))
    return embedding.embed_positions(rows, at.tensor("pos_embed"), scale=at.knob("pos_embed.scale"))


def _resid_pre(at: FormulaContext) -> Tensor:
    if has_streams(at):
        return in_altup.shown_of(at, at.site("altup.pre"))
    layer, stream = at.layer or 0, _between_blocks(at)
    once_more = REPEATED.get(at.knob("residual.repeated"))
    return stream if once_more is None or layer < once_more else at.block(layer - once_more, stream)


def _between_blocks(at: FormulaContext) -> Tensor:
    """Return the stream that enters a block: the output of the block before it, or the embeddings for the first block."""
    if at.layer:
        return at.site(f"blocks.{at.layer - 1}.resid_post")
    stream = at.site("embed_ln.out" if at.has("norm.embed_ln") else "embed")
    if not at.has("pos_embed"):
        return stream
    made = at.site("pos_embed")
    return added(stream, made * float(at.knob("residual.pos_embed")) if at.is_given("pos_embed") else made)


def _ln1(at: FormulaContext) -> Tensor:
    return normed(at, read_by_norm(at, "ln1.out", "altup.active" if has_streams(at) else "resid_pre"), "norm.ln1")


def _attn_out(at: FormulaContext) -> Tensor:
    made = at.site("ln1_post.out" if at.has("norm.ln1_post") else "attn_proj")
    return made * float(at.knob("residual.scale"))


def _ln2(at: FormulaContext) -> Tensor:
    """Return the output of the norm before the MLP, with the first norm's tensors if a block has one norm for both sublayers."""
    role = "norm.ln2" if at.has("norm.ln2") else "norm.ln1"
    return normed(at, read_by_norm(at, "ln2.out", "resid_pre" if is_parallel(at) else "resid_mid"), role)


def _mlp_out(at: FormulaContext) -> Tensor:
    made = at.site("ln2_post.out" if at.has("norm.ln2_post") else "mlp_proj")
    return made * float(at.knob("residual.scale"))


def _has_multiplier(at: FormulaContext) -> bool:
    return at.says("residual.scale")


def _of_attention(at: FormulaContext) -> Tensor:
    """Return what attention adds to the stream.

    If a model has a residual multiplier, programs capture `attn_out` either before or after it, so the sum is computed from the
    projection. Otherwise a wrong factor `residual.attn_out` can be observed, and is applied, only if `attn_out` itself is given.
    """
    if _has_multiplier(at):
        return _attn_out(at)
    made = at.site("attn_out")
    return made * float(at.knob("residual.attn_out")) if at.is_given("attn_out") else made


def _of_mlp(at: FormulaContext) -> Tensor:
    """Return what the MLP adds to the stream, by the same rules as `_of_attention`."""
    if _has_multiplier(at):
        return _mlp_out(at)
    made = at.site("mlp_out")
    return made * float(at.knob("residual.mlp_out")) if at.is_given("mlp_out") else made


def _resid_mid(at: FormulaContext) -> Tensor:
    """Return the stream after attention; in a parallel block with a second norm, the block's input, which that norm reads."""
    if has_laurel(at):
        return in_altup.middle(at, _of_attention(at))
    if is_parallel(at) and at.has("norm.ln2"):
        return at.entering()
    return added(_stream(at, "resid_pre"), _of_attention(at))


def _stream(at: FormulaContext, site: str) -> Tensor:
    """Return the stream that a sublayer's output is added to; a factor `residual.stream` applies only if this site is given."""
    x = at.entering() if site == "resid_pre" else at.site(site)
    return x * float(at.knob("residual.stream")) if at.is_given(site) else x


def _resid_post(at: FormulaContext) -> Tensor:
    made = _behind_block(at)
    return at.block(at.layer or 0, made) if at.knob("residual.repeated") == OF_FIRST else made


def _behind_block(at: FormulaContext) -> Tensor:
    if at.is_given("resid_post") and at.knob("residual.skipped"):
        return at.site("resid_pre")
    if has_streams(at):
        return in_altup.shown_of(at, at.site("altup.post"))
    if at.knob("norm.order") == AFTER_SUM and not at.has("norm.ln2_post"):
        return at.site("ln2.out")
    if is_parallel(at):
        return added(_stream(at, "resid_pre"), _of_attention(at), _of_mlp(at))
    made = added(_stream(at, "resid_mid"), _of_mlp(at))
    made = added(made, at.site("per_layer.out")) if _has_own_embeddings(at) else made
    scalar = at.weight("residual.scalar") if at.knob("residual.scalar") is not False else None
    return made if scalar is None else made * scalar


def _has_own_embeddings(at: FormulaContext) -> bool:
    return at.has("per_layer.gate")


def _per_layer(at: FormulaContext) -> Tensor:
    """Return what a block adds to the stream for its per-layer embedding of each token."""
    gate = at.tensor("per_layer.gate")
    width = len(gate)
    first = ((at.layer or 0) + at.knob("per_layer.blocks_on")) % at.dim("n_layers") * width
    x = project(at.site("embed"), at.stored("per_layer.project")[first : first + width].to(at.decoder.dtype))
    own = per_layer.embedded(
        at.batch.tokens, at.stored("per_layer.table")[:, first : first + width],
        normed(at, x * float(at.knob("per_layer.project_scale")), "norm.per_layer"),
        table_scale=at.knob("per_layer.table_scale"), scale=at.knob("per_layer.scale"), dtype=at.decoder.dtype,
    )  # fmt: skip
    with_streams = has_streams(at)
    stream = in_altup.read_by_own_embeddings(at) if with_streams else added(at.site("resid_mid"), at.site("mlp_out"))
    made = per_layer.gated(stream, own, gate, at.tensor("per_layer.up"), lambda y: hidden(at, y, None))
    return normed(at, made, "norm.per_layer_post")


def _ln_final(at: FormulaContext) -> Tensor:
    dropped = at.knob("residual.blocks_dropped")
    last = f"blocks.{at.dim('n_layers') - 1 - dropped}.resid_post"
    return normed(at, at.site("altup.combined" if has_streams(at) else last), "norm.final")


def _logits(at: FormulaContext) -> Tensor:
    return logits(
        at.site("ln_final.out"), at.stored("unembed"), at.multiple("unembed.bias", at.knob("logits.bias")),
        scale=at.knob("logits.scale"),
        softcap=at.knob("logits.softcap"), shift=at.knob("logits.shift"), arithmetic=at.knob("logits.dtype"),
    )  # fmt: skip


OUTSIDE: dict[str, Make] = {
    "embed": _embed,
    "pos_embed": _pos_embed,
    "embed_ln.out": lambda at: normed(at, at.site("embed"), "norm.embed_ln"),
    "altup.combined": in_altup.combined,
    "ln_final.out": _ln_final,
    LOGITS: _logits,
    RETURNED: lambda at: at.site(LOGITS),
}
"""The formulas of the sites before and after the blocks."""
IN_BLOCK: dict[str, Make] = {
    "resid_pre": _resid_pre,
    "altup.pre": in_altup.entering,
    "altup.predicted": in_altup.predicted,
    "altup.active": lambda at: in_altup.active_of(at, at.site("altup.predicted")),
    "ln1.out": _ln1,
    "laurel.out": in_altup.laurel,
    **{latent: partial(latent_of, latent=latent) for latent in dict.fromkeys(LATENTS.values())},
    **{f"{latent}_norm.out": partial(latent_norm, latent=latent) for latent in dict.fromkeys(LATENTS.values())},
    **{part: partial(projected, part=part) for part in "qkv"},
    **{f"{part}_norm.out": partial(head_norm, part=part) for part in "qk"},
    **{f"rot_{part}": partial(read_by_scores, part=part) for part in "qk"},
    "attn_scores": scores_of,
    "pattern": pattern_of,
    "z": z_of,
    "attn_gate": gate_of,
    **{f"delta.{part}": partial(in_delta.projected, part=part) for part in in_delta.PARTS},
    "delta.out": in_delta.read,
    "z_gated": lambda at: in_delta.gated(at) if has_delta(at) else gated_heads(at),
    "attn_proj": partial(projected, part="o"),
    "ln1_post.out": lambda at: normed(at, read_by_norm(at, "ln1_post.out", "attn_proj"), "norm.ln1_post"),
    "attn_out": _attn_out,
    "resid_mid": _resid_mid,
    "ln2.out": _ln2,
    "mlp.pre": lambda at: in_mlp.gated_inner(at, 0) if has_gate(at) else in_mlp.inner(at, "mlp.up"),
    "mlp.pre_linear": lambda at: in_mlp.gated_inner(at, 1),
    "mlp.post": in_mlp.post,
    "mlp.dense": in_mlp.down,
    "mlp.dense_post.out": lambda at: normed(at, at.site("mlp.dense"), "norm.dense_post"),
    "ln2_router.out": in_mixture.router_input,
    "mlp.router_logits": in_mixture.router_logits,
    "mlp.router_weights": in_mixture.router_weights,
    "ln2_experts.out": lambda at: normed(at, at.site("resid_mid"), "norm.experts"),
    "mlp.routed": in_mixture.routed,
    "mlp.routed_post.out": lambda at: normed(at, at.site("mlp.routed"), "norm.routed_post"),
    "mlp_proj": lambda at: in_mixture.mixture(at) if is_mixture(at) else in_mlp.down(at),
    "ln2_post.out": lambda at: normed(at, read_by_norm(at, "ln2_post.out", "mlp_proj"), "norm.ln2_post"),
    "mlp_out": _mlp_out,
    "altup.activated": lambda at: added(at.site("resid_mid"), _of_mlp(at)),
    "altup.corrected": in_altup.corrected,
    "per_layer.out": _per_layer,
    "altup.post": in_altup.leaving,
    "resid_post": _resid_post,
}
"""The formulas of the sites of a block, by their names in it, in the order in which data flow."""


DELTA = {*(f"delta.{part}" for part in in_delta.PARTS), "delta.out"}
ATTENTION = {"q", "k", "v", "q_norm.out", "k_norm.out", "rot_q", "rot_k", "attn_scores", "pattern", "z", "attn_gate"}
"""The sites that only blocks with linear attention have (`DELTA`), and those that only the other blocks have (`ATTENTION`)."""


STREAMS = ("altup.pre", "altup.predicted", "altup.active", "altup.activated", "altup.corrected", "altup.post")
"""The additional sites of blocks with several streams."""


ONLY_WITH = {
    "norm.ln1_post": ("ln1_post.out",),
    "norm.ln2_post": ("ln2_post.out",),
    "norm.q": ("q_norm.out",),
    "norm.k": ("k_norm.out",),
    "norm.q_latent": ("q_latent", "q_latent_norm.out"),
    "norm.kv_latent": ("kv_latent", "kv_latent_norm.out"),
    "norm.router": ("ln2_router.out",),
    "norm.experts": ("ln2_experts.out",),
    "norm.dense_post": ("mlp.dense", "mlp.dense_post.out"),
    "norm.routed_post": ("mlp.routed", "mlp.routed_post.out"),
    "moe.router": ("mlp.router_logits", "mlp.router_weights"),
    "per_layer.gate": ("per_layer.out",),
    "laurel.left": ("laurel.out",),
    "altup.router": STREAMS,
    "attn.gate": ("attn_gate",),
}
"""The sites that a block has only if the checkpoint holds the tensor of this role."""


def sites_of(at: FormulaContext) -> list[str]:
    """Return the sites that a block has by the checkpoint's tensors and its knobs, in the order in which data flow."""
    gone: set[str] = set()
    for role, sites in ONLY_WITH.items():
        gone |= set() if at.has(role) else set(sites)
    gone |= ATTENTION if has_delta(at) else DELTA
    gone |= {"z_gated"} if read_by_output(at) == "z" else set()
    gone |= set() if reads_of(at, "v") == "v" else {"k", "v", "k_norm.out", "rot_k"}
    gone |= {f"{part}_norm.out" for part in "qk" if normed_late(at, part)}
    gone |= {"mlp.pre", "mlp.pre_linear", "mlp.post"} if is_mixture(at) and not beside_mlp(at) else set()
    gone |= {"mlp.pre_linear"} if not has_gate(at) else set()
    if at.knob("norm.order") == POST:
        gone |= {"ln1.out", "ln2.out"}
    if is_parallel(at):
        gone |= {"resid_mid"} if at.has("norm.ln2") else {"resid_mid", "ln2.out"}
    return [site for site in IN_BLOCK if site not in gone]
