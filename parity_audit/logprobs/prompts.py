"""Prompts of a run, as token ids: built ones, or a file of ids, texts or chat messages.

Built prompts are seeded draws over the whole vocabulary behind the checkpoint's first special token: they say nothing in
any language, and reach tokens that text never does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from parity_audit.core.errors import UsageError
from parity_audit.core.types import Checkpoint
from parity_audit.logprobs.causes import SpecialTokens
from parity_audit.logprobs.texts import tokenizer_of

BUILT = 8
LENGTHS = (4, 48)
"""Shortest and longest built prompt: cheap, and of different lengths, so that batches are ragged."""

CACHED_LENGTHS = (4, 288)
"""The longest fills two blocks of 128 tokens, the size on a CPU and the largest in use."""

Prompts = tuple[tuple[int, ...], ...]


def built(
    config: dict[str, Any], special: SpecialTokens, *, seed: int, count: int = BUILT, cached: bool = False
) -> Prompts:
    """Seeded prompts of different lengths, each beginning with the beginning-of-sequence token where there is one.

    `cached`: some are long enough to fill a block of an engine's prefix cache.
    """
    rng = np.random.default_rng(seed)
    start = () if special.bos is None else (special.bos,)
    barred = {special.bos, special.pad, *special.eos}
    ordinary = np.array([token for token in range(int(config["vocab_size"])) if token not in barred])
    lengths = np.linspace(*(CACHED_LENGTHS if cached else LENGTHS), count).astype(int)
    return tuple((*start, *rng.choice(ordinary, length).tolist()) for length in lengths)


def special_tokens(checkpoint: Checkpoint, config: dict[str, Any]) -> SpecialTokens:
    """Special ids from generation_config.json, else config.json."""
    own = {**config, **_json(Path(checkpoint.path) / "generation_config.json")}
    eos = own.get("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return SpecialTokens(bos=own.get("bos_token_id"), eos=ends, pad=own.get("pad_token_id"))


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sampling settings that an engine takes from generation_config.json when nobody gives any."""
    content = _json(Path(checkpoint.path) / "generation_config.json")
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {key: content[key] for key in keys if content.get(key) is not None}


def read_prompts(path: Path, checkpoint: Checkpoint, *, chat: bool = False) -> Prompts:
    """Prompts of a file: .txt (one text per line) or .jsonl with `token_ids`, `prompt_ids`, `text` or `messages`.

    Texts are tokenised by the checkpoint's own tokenizer; chat messages go through its template, which writes its
    special tokens itself. With `chat` a text is the message of a user.

    Raises:
        UsageError: no such file, no prompt in it, or a row of another kind.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", code="prompts", hint="a .txt or .jsonl file of prompts")
    found = tuple(_ids(row, where, checkpoint, chat=chat) for where, row in _rows(path))
    if not found or any(not ids for ids in found):
        raise UsageError(f"{path} holds an empty prompt, or none", code="prompts", where=str(path))
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if path.suffix == ".txt":
            yield where, {"text": line}
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"a prompt is not valid JSON: {error}", code="prompts", where=where) from None
        yield where, row if isinstance(row, dict) else {"token_ids": row}


def _ids(row: dict[str, Any], where: str, checkpoint: Checkpoint, *, chat: bool) -> tuple[int, ...]:
    given = row.get("token_ids", row.get("prompt_ids"))
    if given is not None:
        if not isinstance(given, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in given):
            raise UsageError("token ids are a list of whole numbers", code="prompts", where=where)
        return tuple(given)
    tokenizer = tokenizer_of(checkpoint)
    if "messages" in row:
        return _chat(tokenizer, row["messages"], where)
    if not isinstance(row.get("text"), str):
        raise UsageError("a prompt has neither token_ids, text nor messages", code="prompts", where=where)
    if chat:
        return _chat(tokenizer, [{"role": "user", "content": row["text"]}], where)
    return tuple(tokenizer(row["text"])["input_ids"])


def _chat(tokenizer: Any, messages: Any, where: str) -> tuple[int, ...]:
    """Messages through the checkpoint's chat template, up to where the model answers."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the checkpoint's tokenizer has no chat template", code="prompts", where=where,
            hint="give prompts as text without --chat, or as token ids",
        )  # fmt: skip
    try:
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template raises what it likes for messages that it does not take
        raise UsageError(
            f"the chat template does not take these messages: {error}", code="prompts", where=where
        ) from None


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
