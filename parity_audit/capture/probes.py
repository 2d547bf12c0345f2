"""Build the probes: seeded token ids, the same for every backend, each built to expose one kind of error."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from parity_audit.core.types import Probe

PAST_THRESHOLD = 64
EXACT_IN_BFLOAT16 = 256
"""bfloat16 represents every whole number up to here and every second one beyond. Positions or distances stored in bfloat16 are
therefore right in any shorter text, whatever the architecture."""
FIRST_ORDINARY_ID = 8
SHORT, REPEATED = 48, 32
PROMPT, DECODED = 20, 8
RAGGED = (40, 23, 9)
SHORTER = (0, 9)
"""By how many tokens the rows of a decoded batch are shorter than the longest."""
BEGUN, CONTINUED = 12, 8
"""Tokens of the prompt of probe `continued`, and of the single step that continues it."""
EDGE_IDS = 8
"""Ids taken from each end of the vocabulary, where special tokens are and where tables end."""
MOST_SPECIAL = 96
"""The most special ids taken besides the ends; some vocabularies reserve thousands."""
ROWS, ROW_LENGTH = 8, 10
"""Rows of probe `batch` and tokens per row. Programs use other kernels from some batch size on; 8 rows exceed the thresholds in
use and are still cheap."""
TWIN = 3
"""The row of probe `batch` that consists of the first tokens of probe `short`."""
FIRST, AGAIN, BATCH = "short", "again", "batch"


def plan_probes(config: Mapping[str, Any], *, seed: int = 0, special: Sequence[int] = ()) -> tuple[Probe, ...]:
    """Return the probes for one config; `special` are the ids of special tokens.

    Probe `long` exceeds every length threshold of the architecture (window, original context) and the positions that bfloat16
    represents exactly, as far as the model's positions allow. It and most of the small probes after it capture the residual
    stream and the outputs only: attention matrices would not fit, or would show nothing that `short` does not. `again` comes
    last, because it tests that a model keeps no state between runs.
    """
    draw = random.Random(seed)
    rows: dict[str, Any] = {"vocab": int(config["vocab_size"]), "bos": config.get("bos_token_id")}
    probes = [
        padded(FIRST, "every component, from BOS on", [_tokens(draw, SHORT, **rows)]),
        padded("repeated", "copying heads: a segment said twice", [_repeated(draw, REPEATED, **rows)]),
        padded("ragged", "a batch of different lengths, padded on the right", [_tokens(draw, n, **rows) for n in RAGGED]),
        padded("left_padded", "padding on the left must shift nothing", [_tokens(draw, n, **rows) for n in RAGGED], left=True),
        padded("decode", "a prompt, then one token at a time from the cache", [_tokens(draw, PROMPT + DECODED, **rows)],
               decode_from=PROMPT),
    ]  # fmt: skip
    length = long_length(config)
    first = list(probes[0].token_ids[0])
    if length > SHORT:
        what = f"past {_threshold(length - PAST_THRESHOLD)}"
        probes.append(padded("long", what, [_tokens(draw, length, **rows)], sites="residual"))
    others = [_tokens(draw, ROW_LENGTH, **rows) for _ in range(ROWS - 1)]
    prompts = [_tokens(draw, PROMPT + DECODED - shorter, **rows) for shorter in SHORTER]
    probes += [
        padded("ids", "special tokens, and both ends of the vocabulary", [edge_ids(special, **rows)], sites="residual"),
        padded(BATCH, f"{ROWS} rows at once: none may depend on the others",
               [*others[:TWIN], first[:ROW_LENGTH], *others[TWIN:]], sites="residual"),
        padded("decode_batch", "prompts of different lengths, padded on the left, then decoded together from the cache",
               prompts, left=True, decode_from=PROMPT),
        padded("continued", f"a prompt, then {CONTINUED} tokens at once from the cache", [first[: BEGUN + CONTINUED]],
               decode_from=BEGUN, at_once=CONTINUED),
        padded("one", "a text of one token", [first[:1]], sites="residual"),
        padded("two", "a text of two tokens", [first[:2]], sites="residual"),
        padded(AGAIN, f"`{FIRST}` once more, after the others: a model must not remember", [first], sites="residual"),
    ]  # fmt: skip
    return tuple(probes)


def edge_ids(special: Sequence[int], *, vocab: int, bos: int | None) -> list[int]:
    """Return BOS, the lowest ids, the special ids (if very many, the first and the last) and the highest ids, each once."""
    own = sorted({token for token in special if 0 <= token < vocab})
    if len(own) > MOST_SPECIAL:
        own = own[: MOST_SPECIAL // 2] + own[-MOST_SPECIAL // 2 :]
    ends = {*range(min(EDGE_IDS, vocab)), *own, *range(max(0, vocab - EDGE_IDS), vocab)}
    return [*([] if bos is None else [bos]), *sorted(ends - {bos})]


def long_length(config: Mapping[str, Any]) -> int:
    """Return the number of tokens needed to cross every length threshold; 0 if the model's positions contain none."""
    return max((edge + PAST_THRESHOLD for edge in thresholds(config)), default=0)


def thresholds(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the length thresholds that a text within the model's positions can cross.

    They are windows, chunks, original context lengths, and the last position that bfloat16 represents exactly. If a config gives
    no limit to its positions (ALiBi), the positions count as unlimited.
    """
    scaling = config.get("rope_scaling") or {}
    key = "original_max_position_embeddings"
    own = (config.get(name) for name in ("sliding_window", "window_size", "attention_chunk_size", "floor_scale", key))
    known = (*own, scaling.get(key), EXACT_IN_BFLOAT16)
    limit = float(config.get("max_position_embeddings") or "inf")
    return tuple(sorted({int(value) for value in known if value and int(value) + PAST_THRESHOLD <= limit}))


def _threshold(length: int) -> str:
    if length == EXACT_IN_BFLOAT16:
        return f"position {length}, up to which bfloat16 holds every position"
    return f"the window or original context of {length} tokens"


def _tokens(draw: random.Random, length: int, *, vocab: int, bos: int | None) -> list[int]:
    ordinary = [draw.randrange(min(FIRST_ORDINARY_ID, vocab - 1), vocab) for _ in range(length)]
    return ordinary if bos is None else [bos, *ordinary[1:]]


def _repeated(draw: random.Random, length: int, *, vocab: int, bos: int | None) -> list[int]:
    half = _tokens(draw, length // 2, vocab=vocab, bos=None)
    row = half + half
    return row if bos is None else [bos, *row[1:]]


def padded(
    name: str, purpose: str, rows: Sequence[list[int]], *, left: bool = False, sites: str = "all", decode_from: int | None = None,
    at_once: int = 1,
) -> Probe:  # fmt: skip
    """Return a probe with its rows padded to one length. Padding repeats a row's last id, because its value must not matter."""
    width = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        pad = width - len(row)
        ids.append((*[row[-1]] * pad, *row) if left else (*row, *[row[-1]] * pad))
        mask.append((*[0] * pad, *[1] * len(row)) if left else (*[1] * len(row), *[0] * pad))
    return Probe(
        name=name, purpose=purpose, token_ids=tuple(ids), mask=tuple(mask), sites=sites, decode_from=decode_from,
        at_once=at_once,
    )  # fmt: skip
