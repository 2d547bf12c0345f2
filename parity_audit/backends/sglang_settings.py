"""How SGLang is started: its environment, its arguments, and a check that gives a readable error before a long start."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from parity_audit.backends.loading import load_name, require_settings
from parity_audit.core.wire import LoadRequest

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
OVERRIDES = "json_model_override_args"
"""The setting of SGLang that replaces keys of the checkpoint's config; JSON text there, a mapping in a BACKEND string."""
OWN_SETTINGS = ("tf32",)
PREFIX_CACHE = "enable_prefix_caching"
"""What every engine's cache of prompt prefixes is called here; SGLang's is its radix cache."""
ROWS = 16
RESERVED = 16
"""Positions beyond the longest sequence: the scheduler keeps a few of the context to itself (6 in 0.5.23)."""
SPARE_TOKENS = 2048
"""Tokens of the key-value pool beside those of the longest row: a batch of short rows fits as well."""
PLAINEST = {
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "random_seed": 0,
    "log_level": "error",
}
"""The plainest path through the engine: nothing is cached across requests."""
ON_CPU = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "mem_fraction_static": 0.9}
"""The only attention kernel and sampler that run on a CPU without the compiled CPU kernels.

The share of memory is a bound and not an allocation, since the number of tokens in the pool is given.
"""


def set_environment(device: str) -> None:
    """Variables that SGLang reads when it is imported."""
    if device == "cpu":
        os.environ[CPU_ENGINE] = "1"


def arguments(request: LoadRequest) -> dict[str, Any]:
    """Arguments of `ServerArgs`: the user's settings over ours. Every prompt runs whole, in one step with all others.

    Raises:
        BackendFailed: a setting that SGLang does not have, with the nearest one.
    """
    given = {key: value for key, value in request.settings.items() if key not in OWN_SETTINGS}
    cache = bool(given.pop(PREFIX_CACHE, False))
    check_settings(given)
    if isinstance(given.get(OVERRIDES), dict):
        given[OVERRIDES] = json.dumps(given[OVERRIDES])
    length = _length(request, given.pop("context_length", None))
    tokens = int(given.get("max_total_tokens", length + SPARE_TOKENS))
    chosen: dict[str, Any] = {
        **PLAINEST, **(ON_CPU if request.device == "cpu" else {}), "model_path": load_name(request.checkpoint),
        "device": request.device, "dtype": request.dtype, "context_length": length, "max_running_requests": ROWS,
        "max_total_tokens": tokens, "max_prefill_tokens": tokens, "chunked_prefill_size": tokens,
        "disable_radix_cache": not cache,
    }  # fmt: skip
    return chosen | given


def _length(request: LoadRequest, asked: Any) -> int:
    """Positions of the longest row: what was asked for, as far as the checkpoint's config goes."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(load_name(request.checkpoint)).get_text_config()
    own = next(
        (int(value) for key in ("max_position_embeddings", "n_positions") if (value := getattr(config, key, 0))), 0
    )
    wanted = int(asked) + RESERVED if asked else own
    return min(wanted, own) if own else wanted


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse what SGLang would only refuse after seconds, as an unexpected keyword.

    Raises:
        BackendFailed: an unknown setting.
    """
    from sglang.srt.server_args import ServerArgs

    known = [*inspect.signature(ServerArgs).parameters, *OWN_SETTINGS, PREFIX_CACHE]
    require_settings(settings, known, "SGLang")
