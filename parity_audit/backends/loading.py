"""The name a checkpoint is loaded by, and what its tokenizer makes of a text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from parity_audit.core.choices import nearest
from parity_audit.core.errors import ENGINE_SETTING, BackendFailed, CannotRun
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest


def load_name(checkpoint: Checkpoint) -> str:
    """The hub id where a hub cache gives these very weights for it (ours or the user's), else the directory."""
    return checkpoint.repo_id if checkpoint.by_name else checkpoint.path


def text_config(config: Any) -> Any:
    """The part of a config of transformers that is about text; all of it in releases before 4.45, which do not tell them apart."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def require_known(name: str) -> None:
    """Refuse a checkpoint of an architecture that this release of transformers does not have.

    Raises:
        BackendFailed: with the code `cannot-run`.
    """
    import transformers

    kind = transformers.PretrainedConfig.get_config_dict(name)[0].get("model_type")
    if kind and kind not in transformers.CONFIG_MAPPING:
        raise BackendFailed(
            f"transformers {transformers.__version__} has no model type `{kind}`", code=CannotRun.default_code
        )


def require_settings(given: Iterable[str], known: Collection[str], of: str) -> None:
    """Refuse settings that an engine does not have; it would do so after seconds, or with a list of two hundred names.

    Args:
        of: what the settings are of, in words.

    Raises:
        BackendFailed: an unknown setting, with the nearest that is known.
    """
    for name in given:
        if name not in known:
            raise unknown_setting(name, known, of)


def unknown_setting(name: str, known: Iterable[str], of: str) -> BackendFailed:
    """The error for a setting that is not one of `known`, with the nearest of them."""
    hint = nearest(name, known)
    return BackendFailed(f"`{name}` is not a setting of {of}" + (f"; {hint}" if hint else ""), code=ENGINE_SETTING)


def makes_cache(request: LoadRequest) -> bool:
    """Whether whole runs of a model of transformers make a cache: where its settings say so."""
    return bool(request.settings.get("use_cache", False))


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model which makes text: some models of several modalities have one of their own."""
    import transformers

    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        found = getattr(transformers, name, None)
        if found is not None and type(config) in found._model_mapping:
            return found
    return transformers.AutoModelForCausalLM  # which says what it does not know


def own_tokenizer(name: str) -> Any:
    """The tokenizer of a checkpoint by its hub id or directory; None where it has none, or this release cannot load it."""
    return _tokenizer_or_error(name)[0]


def tokenizer_error(checkpoint: Checkpoint) -> str:
    """Why this release cannot load a checkpoint's tokenizer, in one line; empty where it can, or there is none."""
    error = _tokenizer_or_error(checkpoint.path)[1] if checkpoint.has_tokenizer else None
    return "" if error is None else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _tokenizer_or_error(name: str) -> tuple[Any, Exception | None]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name), None
    # A package that a release asks for is an ImportError, a file of a newer release a bare Exception.
    except Exception as error:
        return None, error


def tokenization(request: LoadRequest, model: Any = None) -> dict[str, list[int]]:
    """Token ids of each text, and of each chat (messages as JSON); empty where there is no tokenizer.

    The tokenizer is the one that a port hangs on its model as `tokenizer`, else the checkpoint's own, read from its directory: the
    process of a live model looks in another hub cache by the same name, or asks the network.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        tokenizer = own_tokenizer(request.checkpoint.path)
    if tokenizer is None:
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
