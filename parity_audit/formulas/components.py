"""One function per site: which inputs, tensors and knobs its formula takes.

The order of a block is read off the checkpoint and two knobs: a norm is there where its weight is, `norm.order` says whether
sublayers read normalised input, `residual.parallel` whether the MLP reads what attention reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.formulas import embedding, experts, in_delta, norms, per_layer
from parity_audit.formulas.in_attention import (
    LATENTS,
    gate_of,
    gated_heads,
    has_delta,
    head_norm,
    latent_norm,
    latent_of,
    normed_late,
    pattern_of,
    projected,
    read_by_output,
    read_by_scores,
    reads_of,
    scores_of,
    z_of,
)
from parity_audit.formulas.knobs import FLOAT32, GATE_UP
from parity_audit.formulas.logits import logits
from parity_audit.formulas.mlp import gated
from parity_audit.formulas.place import Place
from parity_audit.formulas.projections import project
from parity_audit.formulas.residual import added

Make = Callable[[Place], Tensor]


def _embed(at: Place) -> Tensor:
    dtype = torch.float32 if at.knob("embed.scale_dtype") == FLOAT32 else torch.float64
    return embedding.embed(
        at.batch.tokens, at.stored("embed"), scale=at.knob("embed.scale"), scale_dtype=dtype, dtype=at.decoder.dtype
    )


def _pos_embed(at: Place) -> Tensor:
    return embedding.embed_positions(
        at.batch.positions, at.tensor("pos_embed"), offset=at.knob("pos_embed.offset"), scale=at.knob("pos_embed.scale")
    )


def _norm(at: Place, x: Tensor, role: str) -> Tensor:
    return norms.norm(
        x, at.weight(role), at.weight(f"{role}.bias"), kind=at.knob("norm.kind"), eps=at.knob("norm.eps"),
        offset=at.knob("norm.offset"), eps_place=at.knob("norm.eps_place"),
    )  # fmt: skip


def _resid_pre(at: Place) -> Tensor:
    if at.layer:
        return at.site(f"blocks.{at.layer - 1}.resid_post")
    stream = at.site("embed_ln.out" if at.has("norm.embed_ln") else "embed")
    return stream + at.site("pos_embed") if at.has("pos_embed") else stream


def _attn_out(at: Place) -> Tensor:
    made = at.site("ln1_post.out" if at.has("norm.ln1_post") else "attn_proj")
    return made * float(at.knob("residual.scale"))


def _parallel(at: Place) -> bool:
    said: object = at.knob("residual.parallel")
    return said is True


def _ln2(at: Place) -> Tensor:
    return _norm(at, at.site("resid_pre" if _parallel(at) else "resid_mid"), "norm.ln2")


def _mlp_input(at: Place) -> Tensor:
    if at.knob("norm.order") == "post":
        return at.site("resid_pre" if _parallel(at) else "resid_mid")
    return at.site("ln1.out" if _parallel(at) and not at.has("norm.ln2") else "ln2.out")


def _inner(at: Place, role: str) -> Tensor:
    return project(_mlp_input(at), at.tensor(role), at.weight(f"{role}.bias"))


def _has_gate(at: Place) -> bool:
    return at.has("mlp.gate")


def _hidden(at: Place, pre: Tensor, linear: Tensor | None) -> Tensor:
    return gated(
        pre, linear, name=at.knob("mlp.activation"), limit=at.knob("mlp.limit"), gelu_root=at.knob("mlp.gelu_root")
    )


def _inner_pair(at: Place) -> tuple[Tensor, Tensor]:
    """Gate and up, of `[d_mlp d_model]`; cut otherwise from a fused tensor of both where `mlp.gate_up` says so."""
    gate, up, cut = at.tensor("mlp.gate"), at.tensor("mlp.up"), at.knob("mlp.gate_up")
    if cut == GATE_UP[2]:
        both = torch.cat([gate, up])
        return both[0::2], both[1::2]
    if cut == GATE_UP[3]:
        both = rearrange([gate, up], "two row column -> (row two) column")
        return both[: len(gate)], both[len(gate) :]
    return gate, up


def _gated_inner(at: Place, which: int) -> Tensor:
    role = ("mlp.gate", "mlp.up")[which]
    return project(_mlp_input(at), _inner_pair(at)[which], at.weight(f"{role}.bias"))


def _post(at: Place) -> Tensor:
    if not _has_gate(at):
        return _hidden(at, at.site("mlp.pre"), None)
    pre, linear = at.site("mlp.pre"), at.site("mlp.pre_linear")
    return _hidden(at, linear, pre) if at.knob("mlp.gate_up") == GATE_UP[1] else _hidden(at, pre, linear)


def _router_weights(at: Place) -> Tensor:
    scored = at.site("mlp.router_logits")
    chosen = _chosen(at, scored)
    made = experts.router_weights(scored, chosen, router=at.knob("moe.router"), norm_topk=at.knob("moe.norm_topk"))
    return made * float(at.knob("moe.scale"))


def _chosen(at: Place, scored: Tensor) -> Tensor:
    """The experts of each token: those of the largest logits, or, where groups or a bias take part, of the largest scores."""
    bias = at.weight("moe.choice_bias") if at.knob("moe.choice_bias") is not False else None
    groups, kept = at.knob("moe.groups"), at.knob("moe.top_groups")
    if groups > kept or bias is not None:
        scored = experts.scores_for_choice(scored, router=at.knob("moe.router"), bias=bias, groups=groups, kept=kept)
    return experts.chosen_experts(scored, at.knob("moe.top_k"))


def _mlp_proj(at: Place) -> Tensor:
    if not at.has("moe.router"):
        return project(at.site("mlp.post"), at.tensor("mlp.down"), at.weight("mlp.down.bias"))
    found = [_expert(at, e) for e in range(at.dim("n_experts"))]
    routed = experts.mixture(
        _mlp_input(at), at.site("mlp.router_weights"), found, partial(_hidden, at), weighted=at.knob("moe.weighted")
    )
    return routed + _shared(at) if at.has("moe.shared.gate") else routed


def _shared(at: Place) -> Tensor:
    """What the expert of all tokens adds; a token's own gate weighs it where the checkpoint has one."""
    shared = experts.Expert(*(at.tensor(f"moe.shared.{name}") for name in ("gate", "up", "down")))
    made = shared.output(_mlp_input(at), partial(_hidden, at)) * float(at.knob("moe.shared_scale"))
    weigher = at.weight("moe.shared.router")
    return made if weigher is None else made * torch.sigmoid(project(_mlp_input(at), weigher))


def _expert(at: Place, e: int) -> experts.Expert:
    biases = (_flat(at.weight(f"moe.{name}.bias.{e}")) for name in ("gate", "up", "down"))
    return experts.Expert(
        *(at.tensor(f"moe.{name}.{e}") for name in ("gate", "up", "down")), *biases,
    )  # fmt: skip


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


def _mlp_out(at: Place) -> Tensor:
    made = at.site("ln2_post.out" if at.has("norm.ln2_post") else "mlp_proj")
    return made * float(at.knob("residual.scale"))


def _resid_post(at: Place) -> Tensor:
    if _parallel(at):
        return added(at.site("resid_pre"), at.site("attn_out"), at.site("mlp_out"))
    made = added(at.site("resid_mid"), at.site("mlp_out"))
    made = added(made, at.site("per_layer.out")) if _has_own_embeddings(at) else made
    scalar = at.weight("residual.scalar") if at.knob("residual.scalar") is not False else None
    return made if scalar is None else made * scalar


def _has_own_embeddings(at: Place) -> bool:
    return at.has("per_layer.gate")


def _per_layer(at: Place) -> Tensor:
    """What a block adds for its own embedding of each token."""
    gate = at.tensor("per_layer.gate")
    width = len(gate)
    first = (at.layer or 0) * width
    x = project(at.site("embed"), at.stored("per_layer.project")[first : first + width].to(at.decoder.dtype))
    own = per_layer.embedded(
        at.batch.tokens, at.stored("per_layer.table")[:, first : first + width],
        _norm(at, x * float(at.knob("per_layer.project_scale")), "norm.per_layer"),
        table_scale=at.knob("per_layer.table_scale"), scale=at.knob("per_layer.scale"), dtype=at.decoder.dtype,
    )  # fmt: skip
    stream = added(at.site("resid_mid"), at.site("mlp_out"))
    made = per_layer.gated(stream, own, gate, at.tensor("per_layer.up"), lambda y: _hidden(at, y, None))
    return _norm(at, made, "norm.per_layer_post")


def _logits(at: Place) -> Tensor:
    return logits(
        at.site("ln_final.out"), at.stored("unembed"), at.weight("unembed.bias"), scale=at.knob("logits.scale"),
        softcap=at.knob("logits.softcap"), shift=at.knob("logits.shift"),
    )  # fmt: skip


OUTSIDE: dict[str, Make] = {
    "embed": _embed,
    "pos_embed": _pos_embed,
    "embed_ln.out": lambda at: _norm(at, at.site("embed"), "norm.embed_ln"),
    "ln_final.out": lambda at: _norm(at, at.site(f"blocks.{at.dim('n_layers') - 1}.resid_post"), "norm.final"),
    LOGITS: _logits,
    RETURNED: lambda at: at.site(LOGITS),
}
"""The sites before and after the blocks."""
IN_BLOCK: dict[str, Make] = {
    "resid_pre": _resid_pre,
    "ln1.out": lambda at: _norm(at, at.site("resid_pre"), "norm.ln1"),
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
    "ln1_post.out": lambda at: _norm(at, at.site("attn_proj"), "norm.ln1_post"),
    "attn_out": _attn_out,
    "resid_mid": lambda at: added(at.site("resid_pre"), at.site("attn_out")),
    "ln2.out": _ln2,
    "mlp.router_logits": lambda at: _inner(at, "moe.router"),
    "mlp.router_weights": _router_weights,
    "mlp.pre": lambda at: _gated_inner(at, 0) if _has_gate(at) else _inner(at, "mlp.up"),
    "mlp.pre_linear": lambda at: _gated_inner(at, 1),
    "mlp.post": _post,
    "mlp_proj": _mlp_proj,
    "ln2_post.out": lambda at: _norm(at, at.site("mlp_proj"), "norm.ln2_post"),
    "mlp_out": _mlp_out,
    "per_layer.out": _per_layer,
    "resid_post": _resid_post,
}
"""The sites of a block, by their names in it."""


DELTA = {*(f"delta.{part}" for part in in_delta.PARTS), "delta.out"}
ATTENTION = {"q", "k", "v", "q_norm.out", "k_norm.out", "rot_q", "rot_k", "attn_scores", "pattern", "z", "attn_gate"}
"""The sites that blocks with a linear attention have, and those that the others have."""


def sites_of(at: Place) -> list[str]:
    """The sites that a block has, in the order in which data flow: those whose tensors the checkpoint holds."""
    gone = set()
    for site, role in {"ln1_post.out": "norm.ln1_post", "ln2_post.out": "norm.ln2_post", "q_norm.out": "norm.q",
                       "k_norm.out": "norm.k", "q_latent": "norm.q_latent", "q_latent_norm.out": "norm.q_latent",
                       "kv_latent": "norm.kv_latent", "kv_latent_norm.out": "norm.kv_latent"}.items():  # fmt: skip
        gone |= {site} if not at.has(role) else set()
    gone |= set() if _has_own_embeddings(at) else {"per_layer.out"}
    gone |= ATTENTION if has_delta(at) else DELTA
    gone |= set() if at.has("attn.gate") else {"attn_gate"}
    gone |= {"z_gated"} if read_by_output(at) == "z" else set()
    gone |= set() if reads_of(at, "v") == "v" else {"k", "v", "k_norm.out", "rot_k"}
    moe = at.has("moe.router")
    gone |= {f"{part}_norm.out" for part in "qk" if normed_late(at, part)}
    gone |= {"mlp.pre", "mlp.pre_linear", "mlp.post"} if moe else {"mlp.router_logits", "mlp.router_weights"}
    gone |= set() if moe or _has_gate(at) else {"mlp.pre_linear"}
    if at.knob("norm.order") == "post":
        gone |= {"ln1.out", "ln2.out"}
    if _parallel(at):
        gone |= {"resid_mid"} if at.has("norm.ln2") else {"resid_mid", "ln2.out"}
    return [site for site in IN_BLOCK if site not in gone]
