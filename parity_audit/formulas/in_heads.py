"""Queries, keys and values up to the scores: projections, norms of heads and rotation; and the gate on the output of attention.

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas import attention, latents, norms, rotary
from parity_audit.formulas.activations import activation
from parity_audit.formulas.choices import (
    CUT_WRONG,
    HEAD_POS,
    IN_ITS_TABLE,
    K_ONLY,
    MISSING,
    ON_QUERIES,
    PLACES,
    POS_HEAD,
    Q_ONLY,
)
from parity_audit.formulas.frequencies import attention_factor, inverse_frequencies
from parity_audit.formulas.in_norms import kind_of, read_by_sublayers, tensors_of
from parity_audit.formulas.knobs import for_queries_or_keys
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.positions import assigned_positions, growth
from parity_audit.formulas.projections import heads, joined, project, taken_for
from parity_audit.formulas.rounding import refuse_narrow

LATENTS = {"q": "q_latent", "k": "kv_latent", "v": "kv_latent"}
"""The latents from which queries, keys and values are projected if a block has latents (DeepSeek)."""


def attention_input(at: FormulaContext) -> Tensor:
    """Return the input of attention: the stream itself, or the output of the norm before attention."""
    return at.entering() if read_by_sublayers(at) else at.site("ln1.out")


def _projected_from(at: FormulaContext, part: str) -> Tensor:
    """Return the input of the projection of queries, keys or values: the normalised latent if the block has one."""
    latent = LATENTS[part]
    return at.site(f"{latent}_norm.out") if at.has(f"norm.{latent}") else attention_input(at)


def _width_of_queries(at: FormulaContext, layer: int) -> int:
    found = at.decoder.weights(layer, "attn.q")
    return 0 if found is None else len(found)


def latent_of(at: FormulaContext, latent: str) -> Tensor:
    return project(attention_input(at), at.tensor(f"attn.{latent}"), at.weight(f"attn.{latent}.bias"))


def latent_norm(at: FormulaContext, latent: str) -> Tensor:
    """Return the normalised latent. Only as many components as the norm has weights are normalised and returned, because the key
    components that all heads share follow after them."""
    x = at.site(latent)[..., : len(at.tensor(f"norm.{latent}"))]
    if at.knob("qk_norm.present") == MISSING:
        return x
    return norms.norm(x, tensors_of(at, "qk_norm", f"norm.{latent}")[0], None, kind_of(at, "qk_norm"))


def projected(at: FormulaContext, part: str) -> Tensor:
    bias = at.knob(f"attention.{part}_bias")
    if bias is True:
        at.tensor(f"attn.{part}.bias")
    made = project(
        _projected_from(at, part) if part != "o" else joined(at.site(read_by_output(at))), at.tensor(f"attn.{part}"),
        None if bias is False else at.weight(f"attn.{part}.bias"),
    )  # fmt: skip
    if part == "o":
        return made
    made = heads(made, at.dim("n_heads") if part == "q" else _kv_heads(at))
    if part != "v" or not at.knob("attention.v_norm"):
        return made
    return norms.norm(made, None, None, norms.Norm(eps=at.knob("qk_norm.eps")))


def _kv_heads(at: FormulaContext) -> int:
    said = at.knob("n_kv_heads")
    return said if isinstance(said, int) else at.dim("n_kv_heads")


def read_by_heads(at: FormulaContext, part: str) -> list[int] | None:
    """Return the head whose keys ("k") or values ("v") each query head reads, or None if `n_kv_heads` is not a list of heads."""
    said = at.knob("n_kv_heads")
    said = said[part] if isinstance(said, dict) else said
    return said if isinstance(said, list) else None


def read_by_output(at: FormulaContext) -> str:
    """Return the site that the output projection reads: z, or z after its gate if the block has a gate or linear attention."""
    return "z_gated" if at.has("attn.gate") or has_delta(at) else "z"


def has_delta(at: FormulaContext) -> bool:
    """Whether a block has linear attention in place of softmax attention."""
    return at.has("delta.conv")


def gate_of(at: FormulaContext) -> Tensor:
    """Return the gate of the attention's output before its activation, `[batch pos head d_head]`."""
    return heads(project(attention_input(at), at.tensor("attn.gate")), at.dim("n_heads"))


def gated_heads(at: FormulaContext) -> Tensor:
    """Return z times its gate, `[batch pos head d_head]`."""
    z = at.site("z")
    return z * activation(at.knob("attention.gate"))(at_queries(at, at.site("attn_gate"), z))


def at_queries(at: FormulaContext, x: Tensor, like: Tensor) -> Tensor:
    """Return x `[batch pos ...]` at the positions of `like`: all of them, or only the queries whose attention was computed."""
    return x if x.shape[1] == like.shape[1] else x[:, at.queries]


def reads_of(at: FormulaContext, site: str) -> str:
    """Return the name of the site of keys or values that a block attends to: its own, or that of an earlier block.

    The last `attention.shared_layers` blocks read the keys and values of `attention.shared_source`. By default this is the last of
    the blocks before them whose queries are as wide as theirs.
    """
    if not at.says("attention.shared_layers") or at.layer is None:
        return site
    own = at.dim("n_layers") - at.knob("attention.shared_layers")
    if at.layer < own:
        return site
    source = at.knob("attention.shared_source")
    if source is not None:
        if not 0 <= source < own:
            raise ValueError(f"layer {source} has no keys and values of its own")
        return f"blocks.{source}.{site}"
    alike = [n for n in range(own) if _width_of_queries(at, n) == _width_of_queries(at, at.layer)]
    if not alike:
        raise ValueError("no block before the shared ones has heads of this size")
    return f"blocks.{alike[-1]}.{site}"


def _has_latents(at: FormulaContext) -> bool:
    return at.has("norm.kv_latent")


def _rotated_part(at: FormulaContext, part: str) -> Tensor:
    """Return the rotated part in latent attention: the last components of each query, or those of the latent, which all heads' keys
    share."""
    if part == "q":
        return latents.end_of_queries(at.site("q"), at.dim("d_rope"))
    return latents.end_of_keys(at.site("kv_latent"), at.dim("d_rope"), at.dim("n_heads"))


def multiplied(at: FormulaContext, part: str) -> Tensor:
    """Return the queries or keys that the scores multiply, `[batch pos head d_head]`.

    In latent attention, the components that are not rotated come first and the rotated ones follow.
    """
    rotated = at.site("rot_q" if part == "q" else reads_of(at, "rot_k"))
    if not _has_latents(at):
        return rotated
    return (latents.whole_queries if part == "q" else latents.whole_keys)(at.site(part), rotated)


def head_norm(at: FormulaContext, part: str) -> Tensor:
    """Return the output of the norm of queries or keys, whether it is applied before or after the rotation."""
    return _normed_heads(at, part, _rotated(at, part) if normed_late(at, part) else cut(at, part))


def cut(at: FormulaContext, part: str, site: str = "") -> Tensor:
    """Return queries ("q"), keys ("k") or values ("v") as heads cut from their projection; `site` names another block's projection.

    A program that cuts them in a wrong order of axes (`attention.cut`) mixes tokens and heads.
    """
    found = at.site(site or part)
    said = at.knob("attention.cut")
    if said == POS_HEAD or part not in CUT_WRONG[said]:
        return found
    return taken_for(found, at.whole_steps(), laid=POS_HEAD, read=HEAD_POS)


def _normed_heads(at: FormulaContext, part: str, x: Tensor) -> Tensor:
    if at.knob("qk_norm.present") == MISSING:
        return x
    weight, bias = tensors_of(at, "qk_norm", f"norm.{part}")
    return norms.norm_of_heads(x, weight, bias, kind_of(at, "qk_norm"), axis=at.knob("qk_norm.axis"))


def normed_late(at: FormulaContext, part: str) -> bool:
    """Whether queries and keys are normalised after the rotation, so that the scores read the output of the norm."""
    if at.knob("qk_norm.weighted") is False:
        return True  # A rotation keeps the length of a head, so a norm without weights is the same before and after it.
    return at.has(f"norm.{part}") and at.knob("qk_norm.order") == norms.AFTER_ROTATION


def _before_rotation(at: FormulaContext, part: str) -> Tensor:
    if _has_latents(at):
        return _rotated_part(at, part)
    normed = at.has(f"norm.{part}") and not normed_late(at, part)
    return clipped(at, at.site(f"{part}_norm.out") if normed else cut(at, part))


def clipped(at: FormulaContext, x: Tensor) -> Tensor:
    """Return queries, keys or values clamped to [-limit, limit], or unchanged if the model has no `attention.clip_qkv`."""
    limit = at.knob("attention.clip_qkv")
    return x if limit is None else x.clamp(-limit, limit)


def read_by_scores(at: FormulaContext, part: str) -> Tensor:
    made = _rotated(at, part)
    made = _normed_heads(at, part, made) if normed_late(at, part) else made
    made = _grown(at, made) if part == "q" else made  # This follows the norm, which would cancel the factor.
    if part != "q" or at.knob("attention.scaled") != ON_QUERIES:
        return made
    return made / attention.of_heads(scale_of(at), made)


def scale_of(at: FormulaContext) -> float | list[float]:
    """Return the divisor of q.k, one number for all heads or one per head; sqrt(d_head) if the spec gives none."""
    said: float | list[float] | None = at.knob("attention.scale")
    return at.dim("d_head") ** 0.5 if said is None else said


def _rotated(at: FormulaContext, part: str) -> Tensor:
    x = _before_rotation(at, part)
    return x if at.knob("rope.layers") == {"q": K_ONLY, "k": Q_ONLY}[part] else turned(at, x, part)


def turned(at: FormulaContext, x: Tensor, part: str) -> Tensor:
    """Return x `[batch pos head d_head]` rotated like queries (part "q") or keys ("k"), unchanged if the layer has no rope."""
    theta = for_queries_or_keys(at.knob("rope.theta"), part)
    if theta is None:
        return x
    arithmetic = at.knob("rope.dtype")
    if arithmetic.endswith(IN_ITS_TABLE):
        refuse_narrow(arithmetic, x)
    scaling, rounding = at.knob("rope.scaling"), at.knob("rope.table_dtype")
    positions = assigned_positions(at.batch, for_queries_or_keys(at.knob("rope.offset"), part))
    frequencies = inverse_frequencies(
        theta, scaling, int(for_queries_or_keys(at.knob("rope.partial"), part) or x.shape[-1]), int(positions.max()) + 1,
        torch.float64 if rounding == rotary.FULL else torch.float32,
    )  # fmt: skip
    cos, sin = rotary.angles(positions, frequencies, x.dtype, rounding=rounding, arithmetic=arithmetic)
    return rotary.rotate(
        x, cos, sin, pairing=for_queries_or_keys(at.knob("rope.pairing"), part), factor=attention_factor(scaling),
        first=at.knob("rope.first_dim"), direction=for_queries_or_keys(at.knob("rope.direction"), part),
    )  # fmt: skip


def _grown(at: FormulaContext, q: Tensor) -> Tensor:
    """Return the queries times a factor that grows with the position, if the model has `attention.temperature_by_position`.

    The factor may count places in the row, with padding, instead of positions.
    """
    said = at.knob("attention.temperature_by_position")
    if said is None:
        return q
    grown = at.batch.places if said.get("counts") == PLACES else at.batch.positions
    return q * rearrange(growth(grown, said["scale"], said["step"]), "batch pos -> batch pos 1 1").to(q)
