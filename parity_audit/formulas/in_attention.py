"""What the sites of attention are made of: queries, keys and values, their norms and rotation, scores, pattern and z.

One function per site, each takes a `Place`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas import attention, cache, latents, norms, rotary
from parity_audit.formulas.activations import activation
from parity_audit.formulas.alibi import penalties, standard_slopes
from parity_audit.formulas.choices import (
    AT_DISTANCE,
    BELOW_TOP,
    EVERY_KEY,
    FULL,
    IN_ITS_TABLE,
    K_ONLY,
    MISSING,
    MOVES,
    ON_QUERIES,
    OVER_QUERIES,
    PLACES,
    Q_ONLY,
    TIMES_OWN,
    VALUES_TOO,
    ZERO_SINKS,
    number_in,
)
from parity_audit.formulas.frequencies import attention_factor, inverse_frequencies
from parity_audit.formulas.in_norms import kind_of, read_by_sublayers, tensors_of
from parity_audit.formulas.knobs import of_part
from parity_audit.formulas.place import Place
from parity_audit.formulas.positions import counted, growth, standing, visible
from parity_audit.formulas.projections import heads, joined, project
from parity_audit.formulas.rounding import any_narrow, refuse_narrow, steps_of

LATENTS = {"q": "q_latent", "k": "kv_latent", "v": "kv_latent"}
"""The latent that each is projected from, where a block has latents (DeepSeek)."""
QUERY_ROWS = 256
"""Queries computed at a time where nobody asks for the attention matrices: 4 heads x 256 x 4160 keys are 34 MiB."""


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


def _read_by_heads(at: Place, part: str) -> list[int] | None:
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
    if "attention.shared_layers" not in at.decoder.values or at.layer is None:
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


def _multiplied(at: Place, part: str) -> Tensor:
    """The queries or keys of the scores, `[batch pos head d_head]`: what is rotated, behind what is not in latent attention."""
    rotated = at.site("rot_q" if part == "q" else reads_of(at, "rot_k"))
    if not _has_latents(at):
        return rotated
    return (latents.whole_queries if part == "q" else latents.whole_keys)(at.site(part), rotated)


def head_norm(at: Place, part: str) -> Tensor:
    """What the norm of queries or keys makes, wherever it stands."""
    return _normed_heads(at, part, _rotated(at, part) if normed_late(at, part) else at.site(part))


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
    return _clipped(at, at.site(part if not at.has(f"norm.{part}") or normed_late(at, part) else f"{part}_norm.out"))


def _clipped(at: Place, x: Tensor) -> Tensor:
    """Queries, keys or values, no entry of which is beyond the limit of a model that has one."""
    limit = at.knob("attention.clip_qkv")
    return x if limit is None else x.clamp(-limit, limit)


def read_by_scores(at: Place, part: str) -> Tensor:
    made = _rotated(at, part)
    made = _normed_heads(at, part, made) if normed_late(at, part) else made
    if part != "q" or at.knob("attention.scaled") != ON_QUERIES:
        return made
    return made / attention.of_heads(_scale(at), made)


def _scale(at: Place) -> float | list[float]:
    """The divisor of q.k, of all heads or of each."""
    said: float | list[float] | None = at.knob("attention.scale")
    return at.dim("d_head") ** 0.5 if said is None else said


def _rotated(at: Place, part: str) -> Tensor:
    x = _before_rotation(at, part)
    if part == "q":
        x = _grown(at, x)
    return x if at.knob("rope.layers") == {"q": K_ONLY, "k": Q_ONLY}[part] else _turned(at, x, part)


def _turned(at: Place, x: Tensor, part: str) -> Tensor:
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
    places = torch.arange(q.shape[1], device=q.device).expand_as(at.batch.positions)
    grown = places if said.get("counts") == PLACES else at.batch.positions
    return q * rearrange(growth(grown, said["scale"], said["step"]), "batch pos -> batch pos 1 1").to(q)


def scores_of(at: Place, rows: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
    """Scores of the queries at `rows`, of all by default; with the keys of a cache where these are given."""
    q, k = _multiplied(at, "q"), _multiplied(at, "k") if keys is None else keys
    chosen = torch.arange(q.shape[1], device=q.device) if rows is None else rows
    scale, bias = _scale(at), at.knob("attention.bias")
    scale = 1.0 if at.knob("attention.scaled") == ON_QUERIES else scale
    seen = visible(
        at.batch.mask,
        chosen,
        window=at.knob("attention.window"),
        chunk=at.knob("attention.chunk"),
        kind=at.knob("attention.mask"),
    )
    seen = _never_blind(at, chosen, seen)
    softcap, penalty, products = at.knob("attention.softcap"), _penalties(at, chosen), at.knob("attention.scores_dtype")
    alone = softcap is None and penalty is None and bias is None
    _refuse_products(products, q, by_shift=alone and _is_power_of_two(scale))
    made = attention.scores(
        q if rows is None else q[:, rows], k, seen,
        scale=scale, softcap=softcap, penalties=penalty, heads=_read_by_heads(at, "k"), arithmetic=products,
    )  # fmt: skip
    made = made if bias is None else made + by_distance(bias, chosen, k.shape[1]).to(made)
    arithmetic = at.knob("attention.softmax_dtype")
    if arithmetic.endswith(BELOW_TOP):
        return made  # behind this site
    if penalty is None:
        refuse_narrow(arithmetic, q)
    return steps_of(arithmetic)("scores", made)


def _is_power_of_two(scale: float | list[float]) -> bool:
    exponents = torch.as_tensor(scale, dtype=torch.float64).log2()
    return bool((exponents == exponents.round()).all())


def _refuse_products(arithmetic: str, q: Tensor, *, by_shift: bool) -> None:
    """Refuse a narrow dtype of the products that `attention.softmax_dtype` says of the scores, or that the queries are in anyway.

    Args:
        by_shift: nothing but a power of two stands between products and scores, so that both round alike.
    """
    if not arithmetic.endswith("products"):
        refuse_narrow(arithmetic, q)
    elif by_shift and not any_narrow(q):
        raise ValueError("products divided by a power of two round as scores do")


def _never_blind(at: Place, rows: Tensor, seen: Tensor) -> Tensor:
    """Keys that queries at these places may see `[batch 1 query key]`; a token from which a mask hides every key sees itself, and
    is noted: programs do different things with it."""
    blind = at.batch.mask.bool()[:, rows] & ~seen.any(-1)[:, 0]
    if not bool(blind.any()):
        return seen
    noted = torch.zeros_like(at.batch.mask, dtype=torch.bool)
    noted[:, rows] = blind
    at.undefined.append(noted)
    own = rearrange(rows, "query -> query 1") == torch.arange(seen.shape[-1], device=rows.device)
    return seen | (rearrange(blind, "batch query -> batch 1 query 1") & own)


def by_distance(bias: Mapping[str, float], rows: Tensor, keys: int) -> Tensor:
    """What is added to the scores of queries at these places for their distance to a key, `[query key]`."""
    table = torch.zeros(keys, dtype=torch.float64)
    known = {int(name.removeprefix(AT_DISTANCE)): value for name, value in bias.items()}
    for distance in known.keys() & range(keys):
        table[distance] = known[distance]
    apart = rearrange(rows, "query -> query 1") - torch.arange(keys, device=rows.device)
    return torch.where(apart >= 0, table.to(rows.device)[apart.clamp_min(0)], 0.0)


def _penalties(at: Place, rows: Tensor) -> Tensor | None:
    """ALiBi's penalties for the queries at these places, None where a model has none."""
    slopes, places = _slopes(at), at.batch.positions
    if slopes is None:
        return None
    return penalties(
        slopes.to(places.device), places[:, rows], places, arithmetic=at.knob("attention.alibi_dtype")
    )  # fmt: skip


def _slopes(at: Place) -> Tensor | None:
    """ALiBi's slope per head: given, or the usual ones times a number."""
    said = at.knob("attention.alibi")
    if said is None or said is False:
        return None
    if isinstance(said, list):
        return torch.tensor(said, dtype=torch.float64)
    return torch.tensor(standard_slopes(at.dim("n_heads")), dtype=torch.float64) * float(said)


def pattern_of(at: Place, scores: Tensor | None = None) -> Tensor:
    s = at.site("attn_scores") if scores is None else scores
    law, arithmetic = at.knob("attention.weights"), at.knob("attention.softmax_dtype")
    if (scores is not None or not at.is_given("attn_scores")) and _slopes(at) is None:
        refuse_narrow(
            arithmetic, _multiplied(at, "q")
        )  # scores made of narrow queries are as coarse, and show it no more
    return attention.weights(s * at.knob("attention.temperature"), law, _sinks(at), arithmetic)


def _sinks(at: Place) -> Tensor | None:
    """The logit per head that takes part in the softmax: the checkpoint's, given ones, or none."""
    said = at.knob("attention.sinks")
    if said is None or said is False:
        return None
    stored = at.tensor("attn.sinks").flatten()
    if said == ZERO_SINKS:
        return torch.zeros_like(stored)
    times = number_in(said, TIMES_OWN)
    return stored.new_tensor(said) if isinstance(said, list) else stored if times is None else times * stored


def z_of(at: Place) -> Tensor:
    v = _clipped(at, at.site(reads_of(at, "v")))
    made = _attended(at, _turned(at, v, "k") if at.knob("rope.layers") == VALUES_TOO else v)
    return made * attention.of_heads(at.knob("attention.heads"), made)


def _attended(at: Place, v: Tensor) -> Tensor:
    """What each head attended to; of decoded tokens, what the cache shows them."""
    kv = _read_by_heads(at, "v")
    if at.is_given("pattern") or at.is_given("attn_scores"):
        return attention.weighted_values(at.site("pattern"), v, kv)
    queries = torch.arange(v.shape[1], device=v.device) if at.queries is None else at.queries
    first = None if at.batch.decoded_from is None or _finds_all(at) else at.batch.decoded_from
    whole = queries if first is None else queries[queries < first]
    made = [
        attention.weighted_values(pattern_of(at, scores_of(at, rows)), v, kv) for rows in torch.split(whole, QUERY_ROWS)
    ]
    decoded = () if first is None else _decoded(at, v, kv, queries[queries >= first], first)
    return torch.cat([*made, *decoded], 1)


def _finds_all(at: Place) -> bool:
    """Whether a decoded token finds in the cache what a whole run would show it, so that both are computed at once."""
    keys, dtype = at.knob("cache.keys"), at.knob("cache.dtype")
    return (keys, dtype) == (EVERY_KEY, FULL) and at.knob("attention.weights") != OVER_QUERIES


def _decoded(at: Place, v: Tensor, kv: list[int] | None, rows: Tensor, first: int) -> Iterator[Tensor]:
    """What tokens at these places, from `first` on, attended to, each of which was decoded from the cache: together where all find
    the same there."""
    kind, dtype = at.knob("cache.keys"), at.knob("cache.dtype")
    k, v = (cache.kept(cache.of_rows(x, kind, first), dtype) for x in (_multiplied(at, "k"), v))
    places, together = counted(at.batch.mask), rows < first + at.batch.at_once
    steps: tuple[Tensor, ...] = (rows[together], *torch.split(rows[~together], 1)) if kind in MOVES else (rows,)
    for own in (step for step in steps if len(step)):  # of no rows, split makes one empty part
        s = scores_of(at, own, k).masked_fill(~cache.shown(kind, own, places, first), -torch.inf)
        yield attention.weighted_values(pattern_of(at, s), cache.moved(v, kind, int(own[-1])), kv)
