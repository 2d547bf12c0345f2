"""Queries, keys and values as attention reads them: projections, norms of heads and rotation; and what is made of its output.

One function per site, each takes a `Place`, from which it asks for inputs, tensors and knobs.
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
from parity_audit.formulas.knobs import of_part
from parity_audit.formulas.place import Place
from parity_audit.formulas.positions import growth, standing
from parity_audit.formulas.projections import heads, joined, project, taken_for
from parity_audit.formulas.rounding import refuse_narrow

LATENTS = {"q": "q_latent", "k": "kv_latent", "v": "kv_latent"}
"""The latent that each is projected from, where a block has latents (DeepSeek)."""


def attention_input(at: Place) -> Tensor:
    """What attention reads of the stream."""
    return at.entering() if read_by_sublayers(at) else at.site("ln1.out")


def _projected_from(at: Place, part: str) -> Tensor:
    """What queries, keys or values are projected from: a normalised latent where the block has one."""
    latent = LATENTS[part]
    return at.site(f"{latent}_norm.out") if at.has(f"norm.{latent}") else attention_input(at)


def _width_of_queries(at: Place, layer: int) -> int:
    found = at.decoder.weights(layer, "attn.q")
    return 0 if found is None else len(found)


def latent_of(at: Place, latent: str) -> Tensor:
    return project(attention_input(at), at.tensor(f"attn.{latent}"), at.weight(f"attn.{latent}.bias"))


def latent_norm(at: Place, latent: str) -> Tensor:
    """The norm of a latent: of as many components as it has weights, because keys' shared part stands behind them."""
    x = at.site(latent)[..., : len(at.tensor(f"norm.{latent}"))]
    if at.knob("qk_norm.present") == MISSING:
        return x
    return norms.norm(x, tensors_of(at, "qk_norm", f"norm.{latent}")[0], None, kind_of(at, "qk_norm"))


def projected(at: Place, part: str) -> Tensor:
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


def _kv_heads(at: Place) -> int:
    said = at.knob("n_kv_heads")
    return said if isinstance(said, int) else at.dim("n_kv_heads")


def read_by_heads(at: Place, part: str) -> list[int] | None:
    """The key-value head that each query head reads keys ("k") or values ("v") of, where that is said one by one."""
    said = at.knob("n_kv_heads")
    said = said[part] if isinstance(said, dict) else said
    return said if isinstance(said, list) else None


def read_by_output(at: Place) -> str:
    """The site that the output projection reads: what attention makes, behind its gate where a block has one."""
    return "z_gated" if at.has("attn.gate") or has_delta(at) else "z"


def has_delta(at: Place) -> bool:
    """Whether a block has a linear attention in place of attention."""
    return at.has("delta.conv")


def gate_of(at: Place) -> Tensor:
    """What the gate of the attention's output is made of, `[batch pos head d_head]`."""
    return heads(project(attention_input(at), at.tensor("attn.gate")), at.dim("n_heads"))


def gated_heads(at: Place) -> Tensor:
    """What attention makes times its gate."""
    z = at.site("z")
    return z * activation(at.knob("attention.gate"))(at_queries(at, at.site("attn_gate"), z))


def at_queries(at: Place, x: Tensor, like: Tensor) -> Tensor:
    """A tensor `[batch pos ...]` at the queries whose attention was computed, where `like` has these positions alone."""
    return x if x.shape[1] == like.shape[1] else x[:, at.queries]


def reads_of(at: Place, site: str) -> str:
    """The site of keys or values that a block attends to: its own, or that of the last block before the shared ones whose heads
    are as large."""
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


def _has_latents(at: Place) -> bool:
    return at.has("norm.kv_latent")


def _rotated_part(at: Place, part: str) -> Tensor:
    """What turns where keys come from a latent: the end of each query, and the end of the latent, which all keys share."""
    if part == "q":
        return latents.end_of_queries(at.site("q"), at.dim("d_rope"))
    return latents.end_of_keys(at.site("kv_latent"), at.dim("d_rope"), at.dim("n_heads"))


def multiplied(at: Place, part: str) -> Tensor:
    """The queries or keys of the scores, `[batch pos head d_head]`: what is rotated, behind what is not in latent attention."""
    rotated = at.site("rot_q" if part == "q" else reads_of(at, "rot_k"))
    if not _has_latents(at):
        return rotated
    return (latents.whole_queries if part == "q" else latents.whole_keys)(at.site(part), rotated)


def head_norm(at: Place, part: str) -> Tensor:
    """What the norm of queries or keys makes, wherever it stands."""
    return _normed_heads(at, part, _rotated(at, part) if normed_late(at, part) else cut(at, part))


def cut(at: Place, part: str, site: str = "") -> Tensor:
    """Queries ("q"), keys or values as they are cut out of their projection; of another block where a `site` is named."""
    found = at.site(site or part)
    said = at.knob("attention.cut")
    if said == POS_HEAD or part not in CUT_WRONG[said]:
        return found
    return taken_for(found, at.whole_steps(), laid=POS_HEAD, read=HEAD_POS)


def _normed_heads(at: Place, part: str, x: Tensor) -> Tensor:
    if at.knob("qk_norm.present") == MISSING:
        return x
    weight, bias = tensors_of(at, "qk_norm", f"norm.{part}")
    return norms.norm_of_heads(x, weight, bias, kind_of(at, "qk_norm"), axis=at.knob("qk_norm.axis"))


def normed_late(at: Place, part: str) -> bool:
    """Whether queries and keys are normalised behind the rotation: attention then reads what the norm makes."""
    if at.knob("qk_norm.weighted") is False:
        return True  # a rotation keeps the length of a head, so that a norm without weights is the same before and behind it
    return at.has(f"norm.{part}") and at.knob("qk_norm.order") == norms.AFTER_ROTATION


def _before_rotation(at: Place, part: str) -> Tensor:
    if _has_latents(at):
        return _rotated_part(at, part)
    normed = at.has(f"norm.{part}") and not normed_late(at, part)
    return clipped(at, at.site(f"{part}_norm.out") if normed else cut(at, part))


def clipped(at: Place, x: Tensor) -> Tensor:
    """Queries, keys or values, no entry of which is beyond the limit of a model that has one."""
    limit = at.knob("attention.clip_qkv")
    return x if limit is None else x.clamp(-limit, limit)


def read_by_scores(at: Place, part: str) -> Tensor:
    made = _rotated(at, part)
    made = _normed_heads(at, part, made) if normed_late(at, part) else made
    made = _grown(at, made) if part == "q" else made  # behind a norm, which would undo it
    if part != "q" or at.knob("attention.scaled") != ON_QUERIES:
        return made
    return made / attention.of_heads(scale_of(at), made)


def scale_of(at: Place) -> float | list[float]:
    """The divisor of q.k, of all heads or of each."""
    said: float | list[float] | None = at.knob("attention.scale")
    return at.dim("d_head") ** 0.5 if said is None else said


def _rotated(at: Place, part: str) -> Tensor:
    x = _before_rotation(at, part)
    return x if at.knob("rope.layers") == {"q": K_ONLY, "k": Q_ONLY}[part] else turned(at, x, part)


def turned(at: Place, x: Tensor, part: str) -> Tensor:
    """x `[batch pos head d_head]` rotated as queries or keys are."""
    theta = of_part(at.knob("rope.theta"), part)
    if theta is None:
        return x
    arithmetic = at.knob("rope.dtype")
    if arithmetic.endswith(IN_ITS_TABLE):
        refuse_narrow(arithmetic, x)
    scaling, rounding = at.knob("rope.scaling"), at.knob("rope.table_dtype")
    positions = standing(at.batch, of_part(at.knob("rope.offset"), part))
    frequencies = inverse_frequencies(
        theta, scaling, int(of_part(at.knob("rope.partial"), part) or x.shape[-1]), int(positions.max()) + 1,
        torch.float64 if rounding == rotary.FULL else torch.float32,
    )  # fmt: skip
    cos, sin = rotary.angles(positions, frequencies, x.dtype, rounding=rounding, arithmetic=arithmetic)
    return rotary.rotate(
        x, cos, sin, pairing=of_part(at.knob("rope.pairing"), part), factor=attention_factor(scaling),
        first=at.knob("rope.first_dim"), direction=of_part(at.knob("rope.direction"), part),
    )  # fmt: skip


def _grown(at: Place, q: Tensor) -> Tensor:
    """Queries times what grows with their positions, or with their places in the row, padding counted, where a model has that."""
    said = at.knob("attention.temperature_by_position")
    if said is None:
        return q
    grown = at.batch.places if said.get("counts") == PLACES else at.batch.positions
    return q * rearrange(growth(grown, said["scale"], said["step"]), "batch pos -> batch pos 1 1").to(q)
