"""The name by which a checkpoint is loaded, checks of settings, and the token ids that its tokenizer makes of a text."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from parity_audit.core.choices import nearest
from parity_audit.core.errors import ENGINE_SETTING, BackendFailed, CannotRun
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest


def load_name(checkpoint: Checkpoint) -> str:
    """Return the hub id if a hub cache, ours or the user's, gives exactly these weights for it, else the directory."""
    return checkpoint.repo_id if checkpoint.by_name else checkpoint.path


def text_config(config: Any) -> Any:
    """Return the text part of a transformers config, or all of it in releases before 4.45, which make no such distinction."""
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
    """Refuse settings that an engine does not have.

    The engine itself would refuse them only after seconds, or with a list of two hundred names.

    Args:
        given: names of the settings in the request.
        known: names of the settings that the engine has.
        of: name of the engine or class that has the settings, for the message.

    Raises:
        BackendFailed: a setting is unknown; the message has the most similar known name.
    """
    for name in given:
        if name not in known:
            raise unknown_setting(name, known, of)


def unknown_setting(name: str, known: Iterable[str], of: str) -> BackendFailed:
    """Return the error for a setting that is not in `known`, with the most similar known name."""
    hint = nearest(name, known)
    return BackendFailed(f"`{name}` is not a setting of {of}" + (f"; {hint}" if hint else ""), code=ENGINE_SETTING)


def makes_cache(request: LoadRequest) -> bool:
    """Whether runs of the whole text make a KV cache in a transformers model: only if the setting `use_cache` is true."""
    return bool(request.settings.get("use_cache", False))


def auto_class(config: Any) -> Any:
    """Return the transformers class that loads a model which generates text; some multimodal models need their own class."""
    import transformers

    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        found = getattr(transformers, name, None)
        if found is not None and type(config) in found._model_mapping:
            return found
    return transformers.AutoModelForCausalLM  # its `from_pretrained` raises an error that names the unknown config


def own_tokenizer(name: str) -> Any:
    """Return a checkpoint's tokenizer by hub id or directory, None if there is none or this release cannot load it."""
    return _tokenizer_or_error(name)[0]


def tokenizer_error(checkpoint: Checkpoint) -> str:
    """Return in one line why this release cannot load a checkpoint's tokenizer; empty if it can, or if there is none."""
    error = _tokenizer_or_error(checkpoint.path)[1] if checkpoint.has_tokenizer else None
    return "" if error is None else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _tokenizer_or_error(name: str) -> tuple[Any, Exception | None]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name), None
    # A missing package raises ImportError, and a tokenizer file of a newer release raises a bare Exception.
    except Exception as error:
        return None, error


def tokenization(request: LoadRequest, model: Any = None) -> dict[str, list[int]]:
    """Return the token ids of each text and of each chat (messages as JSON); empty if there is no tokenizer.

    The tokenizer is the model's attribute `tokenizer` if a port set it, else the checkpoint's own. The latter is read from the
    directory and not by name, because the process of a live model would look in another hub cache or ask the network.
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
    """Return the token ids of each chat (messages as JSON) by the tokenizer's template; empty if it has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return {}
    return {
        chat: list(tokenizer.apply_chat_template(json.loads(chat), add_generation_prompt=True, return_dict=False))
        for chat in chats
    }
