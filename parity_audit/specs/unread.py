"""Keys of a config that no expression of its spec reads, and that change what transformers computes."""

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
"""Names of tokens, of files, of training, and of what the weights or the probes show by themselves."""
CONSTANTS = ("dims", "layer_dims", "knobs")
"""The parts of a spec that say what is computed."""
TOKENS = 32
MOST = 8
"""Keys that are measured; each builds two miniatures, in about a second."""


def unread_keys(model: ResolvedModel) -> list[tuple[str, Any, bool | None]]:
    """(key, value, whether it changes the function) of keys off their default that the spec does not read.

    Each key is measured: a miniature with it and one without it, drawn from the same seed, must give the same logits.
    None stands for one that could not be measured. Keys that change nothing are left out.
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
    """Every name that an expression in these parts of the spec could read."""
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
    """What the configuration class says of a key that the file leaves out; NotImplemented for one it does not know."""
    rest = {name: value for name, value in config.items() if name not in (key, "model_type")}
    try:
        return json.loads(of_kind(**copy.deepcopy(rest)).to_json_string(use_diff=False)).get(key, NotImplemented)
    except Exception:  # a class refuses in its own ways; then the key is measured
        return NotImplemented


def _matters(model: ResolvedModel, key: str) -> bool | None:
    without = {name: value for name, value in model.config.items() if name != key}
    try:
        return not torch.equal(_logits(model), _logits(dataclasses.replace(model, config=without)))
    except Exception:  # transformers cannot build one of them
        return None


def _logits(model: ResolvedModel) -> torch.Tensor:
    """Logits of one seeded text on a miniature, in transformers."""
    network = built(model).eval()
    vocab = network.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = network(ids).logits
    return logits
