"""Teacher-forced log-probabilities of completions from a transformers model, as trainers compute them.

The decoder runs once per batch of completions of similar length, padded on the right. The padding mask is made from the
lengths and never from the ids, because the padding token may be the end-of-sequence token. The model's own head, with its
soft-cap or scale, is then called on chunks of tokens. For this, the whole model is called while its decoder is replaced
by a function that returns the hidden states already computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends.base import Tell
from parity_audit.backends.float64 import promoted
from parity_audit.backends.loading import text_config
from parity_audit.backends.rounding import attention_by, head_in, narrow_cache, routers_in, tables_in
from parity_audit.backends.token_scores import TokenScores, score_tokens
from parity_audit.core.errors import is_out_of_memory
from parity_audit.core.rollouts import Completion, ScoreReply, ScoreRequest, Scores, Variation
from parity_audit.core.wire import FLOAT64


def score(model: Any, request: ScoreRequest, device: str, tell: Tell) -> ScoreReply:
    """Return the scores of every completion, in the order of the request.

    If a batch runs out of memory, it is tried again with half as many tokens.

    Raises:
        ValueError: a completion without tokens or without a prompt, a memory budget that is too small, or a request for scores
            from step-by-step decoding.
    """
    if request.decoded:
        raise ValueError(
            "transformers scores whole sequences here; only an engine's decode path is asked token by token"
        )
    _check(request.completions)
    order = sorted(range(len(request.completions)), key=lambda number: _length(request.completions[number]))
    found: dict[int, Scores] = {}
    facts = {"batch_tokens": request.batch_tokens, "head_rows": 0}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if request.precision == FLOAT64:
            stack.enter_context(promoted(model))
        stack.enter_context(varied(model, request.variation))
        while len(found) < len(order):
            rest = order[len(found) :][: request.variation.rows or None]
            batch = _next_batch(rest, request.completions, int(facts["batch_tokens"]))
            try:
                rows, chunk = _score_batch(model, [request.completions[number] for number in batch], request, device)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(batch) == 1:
                    raise
                facts["batch_tokens"] = int(facts["batch_tokens"]) // 2
                continue
            found |= dict(zip(batch, rows, strict=True))
            facts["head_rows"] = max(int(facts["head_rows"]), chunk)
            tell("score", len(found), len(order))
    return ScoreReply(scores=tuple(found[number] for number in range(len(order))), facts=facts)


@contextmanager
def varied(model: Any, variation: Variation) -> Iterator[None]:
    """While the context is open, use the variation's attention and its dtypes of head, rotary tables and routers.

    The variation's hidden tokens, its dtype of keys and values, and its batch size are applied by the caller.

    Raises:
        ValueError: the model has no such step (for example rotary tables in a model without rotary embedding).
    """
    with (
        head_in(model, variation.head_dtype), tables_in(model, variation.rope_dtype),
        routers_in(model, variation.router_dtype), attention_by(model, variation.attention),
    ):  # fmt: skip
        yield


def _check(completions: tuple[Completion, ...]) -> None:
    for number, completion in enumerate(completions):
        if not completion.token_ids or not completion.prompt_ids:
            raise ValueError(f"completion {number} has no tokens to score, or no prompt to score them from")


def _length(completion: Completion) -> int:
    return len(completion.prompt_ids) + len(completion.token_ids)


def _next_batch(order: list[int], completions: tuple[Completion, ...], batch_tokens: int) -> list[int]:
    """Return the first completions of `order` whose padded batch has at most `batch_tokens` tokens, at least one.

    `order` lists the numbers of completions, shortest first, so that the last one of a batch decides its width.
    """
    batch: list[int] = []
    for number in order:
        if batch and (len(batch) + 1) * _length(completions[number]) > batch_tokens:
            break
        batch.append(number)
    return batch


def _score_batch(model: Any, batch: list[Completion], request: ScoreRequest, device: str) -> tuple[list[Scores], int]:
    width = max(_length(completion) for completion in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, completion in enumerate(batch):
        tokens = (*completion.prompt_ids, *completion.token_ids)
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = torch.tensor([token not in request.variation.hidden_tokens for token in tokens])
    decoder = _decoder(model)
    padded = bool((mask == 0).any())
    arguments = {"attention_mask": mask.to(device)} if padded else {}
    cache = narrow_cache(request.variation.kv_dtype)
    if cache is not None:
        arguments["past_key_values"] = cache
    output = decoder(input_ids=ids.to(device), use_cache=cache is not None, **arguments)
    hidden = output.last_hidden_state
    if cache is not None and not cache.updates:
        raise ValueError("the model does not keep its keys and values in a cache that could be rounded")
    places = [
        (row, position)
        for row, completion in enumerate(batch)
        for position in range(len(completion.prompt_ids), _length(completion))
    ]
    rows, positions = (torch.tensor(axis) for axis in zip(*places, strict=True))
    with _handing_out(decoder, type(output)) as head:
        scored = score_tokens(
            hidden[rows, positions - 1], ids[rows, positions].to(device), lambda some: head(model, some),
            d_vocab=text_config(model.config).vocab_size, memory_bytes=request.memory_bytes,
            temperatures=request.temperatures, truncation=request.truncation,
        )  # fmt: skip
    return _split(scored, [len(completion.token_ids) for completion in batch]), scored.chunk


def _decoder(model: Any) -> nn.Module:
    """Return the model without its head; its last hidden state is the output of the final norm."""
    found: nn.Module = getattr(model, model.base_model_prefix)
    return found


@contextmanager
def _handing_out(decoder: Any, kind: Any) -> Iterator[Any]:
    """While the context is open, make the decoder return given hidden states, so that a call of the model only runs its head.

    Yields a function that takes the model and hidden states `[token d_model]` and returns logits `[token d_vocab]`.

    Args:
        decoder: the model without its head.
        kind: class of the decoder's output.
    """
    given: list[Tensor] = []
    own = decoder.forward

    def forward(*_: Any, **__: Any) -> Any:
        return kind(last_hidden_state=given[0][None])

    def head(model: Any, hidden: Tensor) -> Tensor:
        given[:] = [hidden]
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits

    decoder.forward = forward
    try:
        yield head
    finally:
        decoder.forward = own


def _split(scored: TokenScores, lengths: list[int]) -> list[Scores]:
    parts, start = [], 0
    for length in lengths:
        some = slice(start, start + length)
        kept = () if scored.log_kept is None else tuple(scored.log_kept[some].tolist())
        parts.append(
            Scores(
                logprobs=tuple(tuple(row[some].tolist()) for row in scored.logprobs), top1=tuple(scored.top1[some].tolist()),
                margin=tuple(scored.margin[some].tolist()), log_kept=kept,
            )
        )  # fmt: skip
        start += length
    return parts
