# parity-audit: transformers may be imported before this file
"""Ports whose model is right and whose tokenizer is not: what each makes of a text is not what the checkpoint's makes."""

from __future__ import annotations

from typing import Any

BOS, ADDED = 2, 300


class Changed:
    """A tokenizer whose ids are changed by a function."""

    chat_template = None

    def __init__(self, own: Any, change: Any) -> None:
        self.own, self.change = own, change

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.change(self.own(text)["input_ids"])}


def _loaded(path: str, change: Any) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.tokenizer = Changed(transformers.AutoTokenizer.from_pretrained(path), change)
    return model


def right(path: str, dtype: str, device: str) -> Any:
    return _loaded(path, lambda ids: ids)


def double_bos(path: str, dtype: str, device: str) -> Any:
    return _loaded(path, lambda ids: [BOS, *ids])


def missing_bos(path: str, dtype: str, device: str) -> Any:
    return _loaded(path, lambda ids: ids[1:])


def shifted(path: str, dtype: str, device: str) -> Any:
    return _loaded(path, lambda ids: [token + (token >= ADDED) for token in ids])


def templated(path: str, dtype: str, device: str) -> Any:
    return _loaded(path, lambda ids: [BOS, 5, 6, *ids[1:], 7])


def other_template(path: str, dtype: str, device: str) -> Any:
    import transformers

    model = _loaded(path, lambda ids: ids)
    model.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}"
    return model
