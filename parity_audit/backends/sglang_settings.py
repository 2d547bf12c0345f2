"""SGLang's environment variables and arguments, and a check of settings that reports errors before the long start."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from parity_audit.backends.loading import load_name, require_settings
from parity_audit.core.wire import LoadRequest

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
OVERRIDES = "json_model_override_args"
"""SGLang's setting that replaces keys of the checkpoint's config: JSON text in SGLang, a mapping in a BACKEND string."""
OWN_SETTINGS = ("tf32",)
PREFIX_CACHE = "enable_prefix_caching"
"""Our setting for the cache of prompt prefixes, the same for each engine; in SGLang it is the radix cache."""
ROWS = 16
"""Largest number of requests that run at a time."""
RESERVED = 16
"""Positions added to the longest sequence, because the scheduler reserves a few of the context (6 in 0.5.23)."""
SPARE_TOKENS = 2048
"""Tokens of the key-value pool in addition to those of the longest row, so that a batch of short rows fits as well."""
PLAINEST = {
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "random_seed": 0,
    "log_level": "error",
}
"""Settings for the simplest path through the engine; with the radix cache off, nothing is cached across requests."""
ON_CPU = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "mem_fraction_static": 0.9}
"""The only attention kernel and sampler that run on a CPU without SGLang's compiled CPU kernels.

`mem_fraction_static` only bounds the memory, since the number of tokens in the pool is given.
"""


def set_environment(device: str) -> None:
    """Set the environment variable that SGLang reads when it is imported for the CPU."""
    if device == "cpu":
        os.environ[CPU_ENGINE] = "1"


def arguments(request: LoadRequest) -> dict[str, Any]:
    """Return the arguments of `ServerArgs`: our defaults, overridden by the user's settings.

    By default all prompts run whole, in one step.

    Raises:
        BackendFailed: SGLang does not know a setting; the message names the most similar setting.
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
    """Return the context length: the length `asked` for plus `RESERVED`, but at most the one in the checkpoint's config.

    Without `asked` it is the length in the config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(load_name(request.checkpoint)).get_text_config()
    own = next(
        (int(value) for key in ("max_position_embeddings", "n_positions") if (value := getattr(config, key, 0))), 0
    )
    wanted = int(asked) + RESERVED if asked else own
    return min(wanted, own) if own else wanted


def check_settings(settings: dict[str, Any]) -> None:
    """Check that SGLang knows the settings; SGLang itself would raise for an unexpected keyword only after seconds.

    Raises:
        BackendFailed: SGLang does not know a setting.
    """
    from sglang.srt.server_args import ServerArgs

    known = [*inspect.signature(ServerArgs).parameters, *OWN_SETTINGS, PREFIX_CACHE]
    require_settings(settings, known, "SGLang")
