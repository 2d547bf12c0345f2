"""The name a checkpoint is loaded by, and what its tokenizer makes of a text."""

from __future__ import annotations

import json
from typing import Any

from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest


def load_name(checkpoint: Checkpoint) -> str:
    """The hub id where a hub cache gives these very weights for it (ours or the user's), else the directory."""
    return checkpoint.repo_id if checkpoint.by_name else checkpoint.path


def tokenization(request: LoadRequest, model: Any = None) -> dict[str, list[int]]:
    """Token ids of each text, and of each chat (messages as JSON); empty where there is no tokenizer.

    The tokenizer is the one that a port hangs on its model as `tokenizer`, else the checkpoint's own.
    """
    from transformers import AutoTokenizer

    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(load_name(request.checkpoint))
        except (OSError, ValueError):
            return {}
    return {text: list(tokenizer(text)["input_ids"]) for text in request.tokenize} | chat_tokens(
        tokenizer, request.chats
    )


def chat_tokens(tokenizer: Any, chats: tuple[str, ...]) -> dict[str, list[int]]:
    """Token ids of each chat (messages as JSON) by the tokenizer's template; empty where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return {}
    return {
        chat: list(tokenizer.apply_chat_template(json.loads(chat), add_generation_prompt=True, return_dict=False))
        for chat in chats
    }
