"""Check that a config.json fits its architecture: that every size is possible and every numeric constant is a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from parity_audit.core.errors import UsageError
from parity_audit.specs.canonical import canonical
from parity_audit.specs.expr import ExprError, evaluate
from parity_audit.specs.installed import instead, lacks
from parity_audit.specs.schema import ResolvedKnob, Spec
from parity_audit.specs.view import config_names, dims, knob_values, raw_sizes

T = TypeVar("T")
LARGEST_SIZE = 1 << 24
"""The largest size of an axis: sixteen times the largest vocabularies. A weight with two axes of this size could not be stored."""
MOST_LAYERS = 4096
"""The largest number of layers: twenty times the deepest released decoders. It is limited because many lists have one
entry per layer."""
LONGEST = 1 << 24
"""The largest length in tokens: more than any context, window or original context."""
LARGEST_WHOLE = 1 << 63
LARGEST_NUMBER = 1e30
"""The largest real constant: larger than every constant of every architecture, and within float32."""
LENGTHS = ("max_position_embeddings", "sliding_window", "window_size", "original_max_position_embeddings")
SECTIONS = ("rope_scaling", "rope_parameters")


def check_config(spec: Spec, config: Mapping[str, Any], where: Path) -> None:
    """Raise an error if a config cannot belong to this architecture.

    Raises:
        UsageError: a key is missing, has the wrong type, or has a size that no model has; the message names the key.
    """

    released = [entry.config.get("model_type") for entry in spec.content.models.values()]

    def refuse(what: str, expected: str = "", hint: str = "") -> UsageError:
        too_old = lacks(config) if config.get("model_type") in released else ""
        return UsageError(
            f"this is no config of {spec.architecture}: {what}", code="bad-config", where=str(where), expected=expected,
            hint=f"{too_old}: {instead(config)}" if too_old else hint or "correct the file, or get it again",
        )  # fmt: skip

    def asked(question: Callable[[Spec, Mapping[str, Any]], T]) -> T:
        try:
            return question(spec, config)
        except ExprError as error:
            if not error.of_config:
                raise
            reads = f"what the spec reads, {error.where}" if error.where else ""
            raise refuse(error.message, reads, error.hint and f"correct the file, or the spec: {error.hint}") from error

    for key, value in config.items():
        if type(value) is int and abs(value) > LARGEST_WHOLE:
            raise refuse(f"`{key}` is a number of {value.bit_length()} bits")
        if key in (numbers := _number_keys(spec)) and isinstance(value, (str, list, dict)):
            raise refuse(f"`{key}` is {value!r:.60}, and no number ({numbers[key]} in a released config)")
    for key in LENGTHS:
        if not (config.get(key) is None or _is_unused_window(config, key) or _is_size(config[key], LONGEST)):
            raise refuse(f"`{key}` is {config[key]!r:.60}")
    for key in SECTIONS:
        inside = config.get(key) or {}
        if not isinstance(inside, dict):
            raise refuse(f"`{key}` is {inside!r:.60}, and no mapping")
        original = inside.get("original_max_position_embeddings")
        if not (original is None or _is_size(original, LONGEST)):
            raise refuse(f"`original_max_position_embeddings` in `{key}` is {original!r:.60}")
    config = canonical(config)
    for name, value in asked(raw_sizes).items():
        if not _is_size(value, MOST_LAYERS if name == "n_layers" else LARGEST_SIZE):
            raise refuse(f"{name} would be {value!r:.60}")
    sizes = asked(dims)
    for name, value in asked(_sizes_of_layers).items():
        if not _is_size(value, LARGEST_SIZE):
            raise refuse(f"{name} would be {value!r:.60}")
    if not _is_size(config.get("vocab_size"), LARGEST_SIZE):
        raise refuse(f"`vocab_size` is {config.get('vocab_size')!r:.60}")
    bos = config.get("bos_token_id")
    if not (bos is None or (type(bos) is int and 0 <= bos < sizes["d_vocab"])):
        raise refuse(f"`bos_token_id` is {bos!r:.60}, with {sizes['d_vocab']} tokens")
    for knob, known in asked(knob_values).items():
        if not _is_constant(known):
            raise refuse(f"{knob} would be {known.value!r:.60}")


def _is_unused_window(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is a sliding window of 0 tokens that the config switches off; transformers saves Qwen2-MoE this way."""
    return key == "sliding_window" and config[key] == 0 and config.get("use_sliding_window") is False


def _number_keys(spec: Spec) -> dict[str, Any]:
    """Return the keys that are numbers in every released config of the architecture that has them, each with one such number.

    Token ids are left out.
    """
    released = [entry.config for entry in spec.content.models.values()]
    keys = {key for config in released for key in config if not key.endswith("_token_id")}
    given = {key: [config[key] for config in released if config.get(key) is not None] for key in keys}
    return {key: values[0] for key, values in given.items() if values and all(map(_is_number, values))}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sizes_of_layers(spec: Spec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the `layer_dims` expressions in each layer, not yet converted to int."""
    names = config_names(config, **dims(spec, config))
    return {
        f"{name} of layer {layer}": evaluate(text, {**names, "l": layer})
        for name, text in spec.content.layer_dims.items()
        for layer in range(names["n_layers"])
    }


def _is_size(value: Any, largest: int) -> bool:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return whole and 1 <= value <= largest


def _is_constant(known: ResolvedKnob) -> bool:
    """Return whether a knob's value is valid: if the knob is a number, a finite number, None, or one of these per layer.

    A knob that is a choice may have any value.
    """
    values = known.value if isinstance(known.value, list) else [known.value]
    if known.kind != "number":
        return True
    return bool(values) and all(
        value is None or (isinstance(value, (int, float)) and abs(value) < LARGEST_NUMBER and not math.isnan(value))
        for value in values
    )
