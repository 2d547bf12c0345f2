"""The sites of attention from queries, keys and values on: scores, pattern and z.

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas import attention, cache
from parity_audit.formulas.alibi import penalties, standard_slopes
from parity_audit.formulas.choices import (
    AT_DISTANCE,
    BELOW_TOP,
    EVERY_KEY,
    FULL,
    HEAD_POS,
    LEFT_OUT,
    MOVES,
    ON_QUERIES,
    OVER_HEADS,
    OVER_QUERIES,
    POS_HEAD,
    SHIFTED_WHEN_FULL,
    TIMES_OWN,
    VALUES_TOO,
    ZERO_SINKS,
    number_in,
)
from parity_audit.formulas.in_heads import (
    clipped,
    cut,
    multiplied,
    read_by_heads,
    reads_of,
    scale_of,
    turned,
)
from parity_audit.formulas.place import FormulaContext, MissingTokens
from parity_audit.formulas.positions import counted, visible
from parity_audit.formulas.projections import taken_for
from parity_audit.formulas.rounding import any_narrow, refuse_narrow, steps_of

QUERY_ROWS = 256
"""The number of queries computed at a time if the attention matrices are not asked for: 4 heads x 256 x 4160 keys are 34 MiB."""
MASKS_KEPT = 16
"""The number of masks kept per batch, enough for all parts of a run under one set of values. A mask of 256 x 8256 keys has 2 MiB."""


def scores_of(at: FormulaContext, rows: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
    """Return the scores of the queries at `rows` (all queries by default), `[batch head query key]`.

    `keys` replace the block's own keys: its first keys only, or the keys that a cache holds.
    """
    q, k = multiplied(at, "q"), multiplied(at, "k") if keys is None else keys
    chosen = torch.arange(q.shape[1], device=q.device) if rows is None else rows
    scale, bias = scale_of(at), at.knob("attention.bias")
    scale = 1.0 if at.knob("attention.scaled") == ON_QUERIES else scale
    seen = _seen_from(at, chosen)[..., : k.shape[1]]
    softcap, products = at.knob("attention.softcap"), at.knob("attention.scores_dtype")
    penalty = _penalties(at, chosen, k.shape[1])
    alone = softcap is None and penalty is None and bias is None
    _refuse_products(products, q, by_shift=alone and _is_power_of_two(scale))
    made = attention.scores(
        q if rows is None else q[:, rows], k, seen,
        scale=scale, softcap=softcap, penalties=penalty, heads=read_by_heads(at, "k"),
        masked=at.knob("attention.masked"), arithmetic=products,
    )  # fmt: skip
    made = made if bias is None else made + by_distance(bias, chosen, k.shape[1]).to(made)
    arithmetic = at.knob("attention.softmax_dtype")
    if arithmetic.endswith(BELOW_TOP):
        return made  # These values round after the largest score was subtracted, which comes after this site.
    if penalty is None:
        refuse_narrow(arithmetic, q)
    return steps_of(arithmetic)("scores", made)


def _is_power_of_two(scale: float | list[float]) -> bool:
    return all(math.frexp(one)[0] == 0.5 for one in (scale if isinstance(scale, list) else [scale]))


def _refuse_products(arithmetic: str, q: Tensor, *, by_shift: bool) -> None:
    """Raise ValueError for a narrow dtype of the products that the scores cannot show, or that another knob describes.

    Rounding of the inputs has no effect if the queries fit a narrow dtype already. Rounding of the products has the same effect as
    rounding of the scores (`attention.softmax_dtype`) if only a power of two lies between them. It is then refused, unless the
    queries fit a narrow dtype: for these, rounding of the scores is refused instead.

    Args:
        by_shift: whether the scores are the products divided by a power of two, without cap, penalty or bias.
    """
    if not arithmetic.endswith("products"):
        refuse_narrow(arithmetic, q)
    elif by_shift and not any_narrow(q):
        raise ValueError("products divided by a power of two round as scores do")


def _seen_from(at: FormulaContext, rows: Tensor) -> Tensor:
    """Return which keys the queries at these places may see, `[batch 1 query key]`.

    A token from which a mask hides every key sees itself, and is recorded as undefined, because programs treat it differently. The
    masks are kept, because a search asks thousands of times for the same few.
    """
    window, chunk, kind = at.knob("attention.window"), at.knob("attention.chunk"), at.knob("attention.mask")
    first = at.knob("attention.window_first") if window is not None else 0
    kept, key = at.batch.masks, (tuple(rows.tolist()), window, first, chunk, kind)
    if key not in kept:
        while len(kept) >= MASKS_KEPT:
            del kept[next(iter(kept))]
        seen = visible(at.batch.mask, rows, window=window, first=first, chunk=chunk, kind=kind)
        kept[key] = _never_blind(at.batch.mask, rows, seen)
    seen, blind = kept[key]
    if blind is not None:
        at.took.undefined[id(blind)] = blind
    return seen


def _never_blind(mask: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mask in which every query that saw nothing sees itself, and these queries `[batch pos]`, None if there are none."""
    blind = mask.bool()[:, rows] & ~seen.any(-1)[:, 0]
    if not bool(blind.any()):
        return seen, None
    noted = torch.zeros_like(mask, dtype=torch.bool)
    noted[:, rows] = blind
    own = rearrange(rows, "query -> query 1") == torch.arange(seen.shape[-1], device=rows.device)
    return seen | (rearrange(blind, "batch query -> batch 1 query 1") & own), noted


def by_distance(bias: Mapping[str, float], rows: Tensor, keys: int) -> Tensor:
    """Return the bias of the scores by distance between query and key, `[query key]`, for queries at these places.

    The bias is 0 for keys after the query and for distances that are not listed.
    """
    table = torch.zeros(max([keys, *(rows + 1).tolist()]), dtype=torch.float64)
    known = {int(name.removeprefix(AT_DISTANCE)): value for name, value in bias.items()}
    for distance in known.keys() & range(len(table)):
        table[distance] = known[distance]
    apart = rearrange(rows, "query -> query 1") - torch.arange(keys, device=rows.device)
    return torch.where(apart >= 0, table.to(rows.device)[apart.clamp_min(0)], 0.0)


def _penalties(at: FormulaContext, rows: Tensor, keys: int) -> Tensor | None:
    """Return ALiBi's penalties for the queries at these places and the first `keys` keys, or None if the model has no ALiBi."""
    slopes, places = _slopes(at), at.batch.positions
    if slopes is None:
        return None
    return penalties(
        slopes.to(places.device), places[:, rows], places[:, :keys], arithmetic=at.knob("attention.alibi_dtype")
    )  # fmt: skip


def _slopes(at: FormulaContext) -> Tensor | None:
    """Return ALiBi's slope per head, either listed by the knob or the standard slopes times its number; None without ALiBi."""
    said = at.knob("attention.alibi")
    if said is None or said is False:
        return None
    if isinstance(said, list):
        return torch.tensor(said, dtype=torch.float64)
    return torch.tensor(standard_slopes(at.dim("n_heads")), dtype=torch.float64) * float(said)


def pattern_of(at: FormulaContext, scores: Tensor | None = None) -> Tensor:
    s = at.site("attn_scores") if scores is None else scores
    law, arithmetic = at.knob("attention.weights"), at.knob("attention.softmax_dtype")
    if (scores is not None or not at.is_given("attn_scores")) and _slopes(at) is None:
        # If the queries fit a narrow dtype, so do the scores, and their rounding cannot be observed.
        refuse_narrow(arithmetic, multiplied(at, "q"))
    return attention.weights(s * at.knob("attention.temperature"), law, _sinks(at), arithmetic)


def _sinks(at: FormulaContext) -> Tensor | None:
    """Return the sink logit of each head: the checkpoint's, a multiple of it, zeros or listed ones, or None for no sinks."""
    said = at.knob("attention.sinks")
    if said is None or said is False:
        return None
    stored = at.tensor("attn.sinks").flatten()
    if said == ZERO_SINKS:
        return torch.zeros_like(stored)
    times = number_in(said, TIMES_OWN)
    return stored.new_tensor(said) if isinstance(said, list) else stored if times is None else times * stored


def z_of(at: FormulaContext) -> Tensor:
    v = clipped(at, cut(at, "v", reads_of(at, "v")))
    made = _attended(at, turned(at, v, "k") if at.knob("rope.layers") == VALUES_TOO else v)
    made = made * attention.of_heads(at.knob("attention.heads"), made)
    if at.knob("attention.joined") == POS_HEAD:
        return made
    if not bool(at.batch.mask.all()):
        raise MissingTokens("what padding attends to would stand in the place of tokens")
    return taken_for(made, at.whole_steps(), laid=HEAD_POS, read=POS_HEAD)


def _attended(at: FormulaContext, v: Tensor) -> Tensor:
    """Return the weighted sum of the values for each head, `[batch query head d_head]`; decoded tokens read keys and values from the
    cache."""
    kv = read_by_heads(at, "v")
    if at.is_given("pattern") or at.is_given("attn_scores"):
        return attention.weighted_values(at.site("pattern"), v, kv)
    queries = torch.arange(v.shape[1], device=v.device) if at.queries is None else at.queries
    first = None if at.batch.decoded_from is None or _finds_all(at) else at.batch.decoded_from
    whole, together = (queries, v.shape[1]) if first is None else (queries[queries < first], first)
    made = [_of_rows(at, v, kv, rows, together) for rows in torch.split(whole, QUERY_ROWS) if len(rows)]
    decoded = () if first is None else _decoded(at, v, kv, queries[queries >= first], first)
    return torch.cat([*made, *decoded], 1)


def _of_rows(at: FormulaContext, v: Tensor, kv: list[int] | None, rows: Tensor, together: int) -> Tensor:
    """Return the weighted sum of the values for the queries at `rows`, which are computed in one step with the first `together`
    tokens."""
    law = at.knob("attention.weights")
    if law == OVER_QUERIES:
        s = scores_of(at, torch.arange(together, device=rows.device))
        return attention.weighted_values(pattern_of(at, s)[:, :, rows], v, kv)
    # Keys after the last one that any of these queries sees have the weight 0; in a long causal text they are half of all keys.
    hidden_weigh_nothing = law != OVER_HEADS and at.knob("attention.masked") == LEFT_OUT
    keys = _up_to_the_last(_seen_from(at, rows)) if hidden_weigh_nothing else v.shape[1]
    pattern = pattern_of(at, scores_of(at, rows, multiplied(at, "k")[:, :keys]))
    return attention.weighted_values(pattern, v[:, :keys], kv)


def _up_to_the_last(seen: Tensor) -> int:
    """Return the number of keys up to the last one that any query may see, for `seen` `[batch 1 query key]`; 1 if they see none."""
    shown = seen.flatten(0, 2).any(0).nonzero()
    return int(shown[-1]) + 1 if len(shown) else 1


def _finds_all(at: FormulaContext) -> bool:
    """Whether a decoded token reads from the cache the same keys and values as in a run without a cache.

    If so, prompt and decoded tokens are computed at once.
    """
    keys, dtype = at.knob("cache.keys"), at.knob("cache.dtype")
    return (keys, dtype) == (EVERY_KEY, FULL) and at.knob("attention.weights") != OVER_QUERIES


def _decoded(at: FormulaContext, v: Tensor, kv: list[int] | None, rows: Tensor, first: int) -> Iterator[Tensor]:
    """Yield the weighted sum of the values for the decoded tokens at these places, which are `first` or later.

    All tokens are computed together if the cache gives each of them the same keys and values, else one decode step at a time.
    """
    kind, dtype = at.knob("cache.keys"), at.knob("cache.dtype")
    k, v = (cache.kept(cache.of_rows(x, kind, first), dtype) for x in (multiplied(at, "k"), v))
    together, each = rows < first + at.batch.at_once, torch.arange(len(rows))
    in_steps = kind in (*MOVES, SHIFTED_WHEN_FULL) or at.knob("attention.weights") == OVER_QUERIES
    steps = (each[together], *torch.split(each[~together], 1)) if in_steps else (each,)
    capacity = min(v.shape[1], at.knob("attention.window") or v.shape[1])
    every = scores_of(at, rows, k).masked_fill(~cache.shown(kind, rows, counted(at.batch.mask), first), -torch.inf)
    for step in (step for step in steps if len(step)):  # torch.split of no rows returns one empty part.
        own, s = rows[step], every[:, :, step]
        empty = cache.emptied(s, kind, own, capacity) if first < capacity else None
        if empty is not None:
            pattern = pattern_of(at, s.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
            yield attention.weighted_values(pattern, v, kv)
            continue
        yield attention.weighted_values(pattern_of(at, s), cache.moved(v, kind, int(own[-1])), kv)
