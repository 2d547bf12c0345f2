"""Read a user's own prompts: texts and chat messages, tokenised by the checkpoint's own tokenizer, or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_audit.capture.probes import padded
from parity_audit.core.errors import UsageError
from parity_audit.core.types import Checkpoint, Probe

ROWS = 8
"""The most prompts in one probe."""
LONGEST_WHOLE = 128
"""Up to this many tokens all sites of a prompt are captured, attention matrices included; beyond it only the residual stream
and the outputs."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids and their source: a text, chat messages as JSON, or neither if the ids themselves were given."""

    ids: tuple[int, ...]
    text: str | None = None
    chat: str | None = None


def own_prompts(
    texts: Sequence[str], file: Path | None, checkpoint: Checkpoint, *, vocab: int, chat: bool = False
) -> tuple[Prompt, ...]:
    """Return the prompts of the command line, followed by those of a file.

    Raises:
        UsageError: no such file, an empty prompt, one that cannot be tokenised, or an id outside the vocabulary.
    """
    given = tuple(_prompt({"text": text}, f"prompt {at}", checkpoint, chat=chat) for at, text in enumerate(texts, 1))
    found = (*given, *(prompts_of(file, checkpoint, chat=chat) if file is not None else ()))
    for at, prompt in enumerate(found, 1):
        if not prompt.ids:
            raise UsageError(f"prompt {at} is empty", code="prompts", hint="give at least one token")
        if not all(0 <= token < vocab for token in prompt.ids):
            outside = next(token for token in prompt.ids if not 0 <= token < vocab)
            raise UsageError(
                f"prompt {at} has the token id {outside}, and the model {vocab} tokens", code="prompts",
                hint="is the tokenizer that of this checkpoint?",
            )  # fmt: skip
    return found


def prompt_probes(prompts: Sequence[Prompt]) -> tuple[Probe, ...]:
    """Return the prompts as probes `prompts`, `prompts-2` ..., of up to `ROWS` rows each, padded on the right."""
    parts = [prompts[start : start + ROWS] for start in range(0, len(prompts), ROWS)]
    return tuple(
        padded(
            "prompts" if at == 1 else f"prompts-{at}", "the user's own prompts", [list(prompt.ids) for prompt in part],
            sites="all" if at == 1 and max(len(prompt.ids) for prompt in part) <= LONGEST_WHOLE else "residual",
        )
        for at, part in enumerate(parts, 1)
    )  # fmt: skip


def read_prompts(path: Path, checkpoint: Checkpoint, *, chat: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the prompts in a file; see `prompts_of`."""
    return tuple(prompt.ids for prompt in prompts_of(path, checkpoint, chat=chat))


def prompts_of(path: Path, checkpoint: Checkpoint, *, chat: bool = False) -> tuple[Prompt, ...]:
    """Return the prompts of a file: .txt (one text per line) or .jsonl with `token_ids`, `prompt_ids`, `text` or `messages`.

    Texts are tokenised by the checkpoint's own tokenizer; chat messages go through its template, which writes the special
    tokens itself. With `chat`, a text is treated as the message of a user.

    Raises:
        UsageError: no such file, no prompt in it, or a row of any other form.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", code="prompts", hint="a .txt or .jsonl file of prompts")
    found = tuple(_prompt(row, where, checkpoint, chat=chat) for where, row in _rows(path))
    if not found or any(not prompt.ids for prompt in found):
        raise UsageError(f"{path} holds an empty prompt, or none", code="prompts", where=str(path))
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 text: {error}", code="prompts", where=str(path)) from None
    for number, line in enumerate(lines, 1):
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


def _prompt(row: dict[str, Any], where: str, checkpoint: Checkpoint, *, chat: bool) -> Prompt:
    given = row.get("token_ids", row.get("prompt_ids"))
    if given is not None:
        if not isinstance(given, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in given):
            raise UsageError("token ids are a list of whole numbers", code="prompts", where=where)
        return Prompt(ids=tuple(given))
    tokenizer = tokenizer_of(checkpoint)
    if "messages" in row:
        return _chat(tokenizer, row["messages"], where)
    if not isinstance(row.get("text"), str):
        raise UsageError("a prompt has neither token_ids, text nor messages", code="prompts", where=where)
    if chat:
        return _chat(tokenizer, [{"role": "user", "content": row["text"]}], where)
    return Prompt(ids=tuple(tokenizer(row["text"])["input_ids"]), text=row["text"])


def _chat(tokenizer: Any, messages: Any, where: str) -> Prompt:
    """Tokenise messages with the checkpoint's chat template, up to the start of the model's answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the checkpoint's tokenizer has no chat template", code="prompts", where=where,
            hint="give prompts as text without --chat, or as token ids",
        )  # fmt: skip
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template may raise any exception for messages that it rejects
        raise UsageError(
            f"the chat template does not take these messages: {error}", code="prompts", where=where
        ) from None
    return Prompt(ids=tuple(ids), chat=json.dumps(messages))


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """Load the checkpoint's own tokenizer.

    Raises:
        UsageError: it has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the checkpoint has no tokenizer: {error}", code="prompts", where=checkpoint.path,
            hint="give prompts as token ids",
        ) from None  # fmt: skip
