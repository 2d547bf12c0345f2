"""Find the keys of a config that no expression of its spec reads although they change what transformers computes."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parity_audit.specs.installed import configuration_class
from parity_audit.specs.miniature import built
from parity_audit.specs.resolve import ResolvedModel
from parity_audit.specs.schema import Spec

NO_FUNCTION = re.compile(
    r"_token_id$|dropout|_drop$|_pdrop$|_coef_clip$|_lr_multiplier$|^initializer_|^init_std$|^output_|^use_cache$|^return_dict$|^cache_|^_"
    r"|^(architectures|model_type|torch_dtype|dtype|transformers_version|auto_map|max_position_embeddings|n_positions"
    r"|tie_word_embeddings|quantization_config|pretraining_tp|router_aux_loss_coef|id2label|label2id|problem_type|task_specific_params)$"
)
"""Keys that are not checked: those of tokens, files and training, and those whose effect the weights or the probes show anyway."""
CONSTANTS = ("dims", "layer_dims", "knobs")
"""The parts of a spec that determine what is computed."""
TOKENS = 32
MOST = 8
"""The most keys to measure; each needs two miniatures, which takes about a second."""


def unread_keys(model: ResolvedModel) -> list[tuple[str, Any, bool | None]]:
    """Return (key, value, whether it changes the logits) for keys that the spec does not read and that are not at their default.

    Each key is measured: the logits of a miniature with the key are compared with those of a miniature without it,
    drawn from the same seed. The third value is None if a key was not measured, because there are more than `MOST` keys
    or because transformers could not build a miniature. Keys that do not change the logits are left out.
    """
    of_kind = configuration_class(model.config)
    if of_kind is None:
        return []
    read = words_of(model.spec)
    keys = [key for key in model.config if key not in read and not NO_FUNCTION.search(key)]
    odd = [key for key in keys if _usual(of_kind, model.config, key) != model.config[key]]
    measured = [(key, model.config[key], _matters(model, key) if at < MOST else None) for at, key in enumerate(odd)]
    return [item for item in measured if item[2] is not False]


def words_of(spec: Spec, parts: tuple[str, ...] = (*CONSTANTS, "backends")) -> set[str]:
    """Return every name in the texts of these parts of the spec, and every key of the spec's miniature sizes.

    These are all the keys that an expression could read.
    """
    said = spec.content.model_dump(include=set(parts))
    config = {name for spec_config in spec.content.miniature.values() for name in spec_config}
    return config | {word for text in _strings(said) for word in re.findall(r"[A-Za-z_]\w*", text)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _usual(of_kind: Any, config: Mapping[str, Any], key: str) -> Any:
    """Return the value that the configuration class gives a key if the config leaves it out.

    NotImplemented if the class does not know the key or rejects the rest of the config.
    """
    rest = {name: value for name, value in config.items() if name not in (key, "model_type")}
    try:
        return json.loads(of_kind(**copy.deepcopy(rest)).to_json_string(use_diff=False)).get(key, NotImplemented)
    except Exception:  # a class may reject a config with any exception; the key is then measured
        return NotImplemented


def _matters(model: ResolvedModel, key: str) -> bool | None:
    without = {name: value for name, value in model.config.items() if name != key}
    try:
        return not torch.equal(_logits(model), _logits(dataclasses.replace(model, config=without)))
    except Exception:  # transformers cannot build one of them
        return None


def _logits(model: ResolvedModel) -> torch.Tensor:
    """Return the logits of a miniature in transformers, on one random text from a fixed seed."""
    network = built(model).eval()
    vocab = network.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = network(ids).logits
    return logits
