"""Start a vLLM engine: its environment variables, its arguments, and checks that report errors before the long start."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from parity_audit.backends.loading import load_name, require_settings, text_config
from parity_audit.backends.vllm_rollouts import forced_decoding
from parity_audit.core.wire import BATCH_INVARIANT, LoadRequest

FORCED_DECODING = "forced_decoding"
"""Our setting that starts the engine so that it can be told which tokens to decode.

Log-probabilities are then raw ones, taken before the logits processor that forces the tokens.
"""
SWITCH = "VLLM_BATCH_INVARIANT"
"""vLLM's own environment variable for batch-invariant kernels. The engine decides which kernels it replaces.

On a CPU, vLLM 0.32 then uses Triton kernels although Triton is not there.
"""
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
EXPERT_PARALLEL, EXPERTS_KERNEL, EXPERT_MAP = "enable_expert_parallel", "cpu_fused_moe", "expert_map"
OWN_SETTINGS = ("tf32", FORCED_DECODING, BATCH_INVARIANT)
TEXT_MODEL = "text_config"
"""Key under which the config of a model of several modalities holds the config of its text model."""
BLOCK = 128
ROWS = 16
MIN_BATCHED_TOKENS = 2048
_imported_with: dict[str, str] = {}
"""The environment variables with which vLLM was or will be imported."""


def set_environment(settings: Mapping[str, Any], device: str) -> None:
    """Set the variables that vLLM reads when it is imported: one process, no telemetry, and products in full float32.

    Without `TRITON_F32_DEFAULT=ieee` the Triton attention kernel multiplies in TF32 and its error is 3e-3.

    Raises:
        RuntimeError: vLLM was imported with other variables, in this process or in the process that it was forked from.
    """
    tf32 = bool(settings.get("tf32", False))
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_FLOAT32_MATMUL_PRECISION": "high" if tf32 else "highest",
        "TRITON_F32_DEFAULT": "tf32" if tf32 else "ieee",
    }
    if world_size(settings) > 1 and device == "cpu":
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # any number of ranks share the available cores
    if BATCH_INVARIANT in settings:
        chosen[SWITCH] = str(int(settings[BATCH_INVARIANT]))
    if _imported_with and _imported_with != chosen:
        raise RuntimeError(f"vLLM was imported with {_imported_with}, and these settings need {chosen}")
    _imported_with.update(chosen)
    os.environ.update(chosen)
    # Without this variable, vLLM uses a single thread when its engine runs in the caller's process.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def world_size(settings: Mapping[str, Any]) -> int:
    """Return the number of processes that share the model."""
    return math.prod(int(settings.get(key) or 1) for key in PARALLEL)


def start(request: LoadRequest) -> Any:
    """Start and return a `vllm.LLM`; `set_environment` has to be called first.

    Raises:
        BackendFailed: vLLM does not know a setting; the message names the most similar setting.
        ValueError: the longest sequence is not known, or the settings ask for expert parallelism or batch-invariant
            kernels and these cannot run on this device.
        Exception: vLLM knows the settings but cannot satisfy them.
    """
    from vllm import LLM

    check_settings(request.settings)
    if request.device == "cpu":
        _check_experts(request.settings)
        for architecture in {request.architecture, *(_config(request).architectures or ())}:
            _inspect_in_process(architecture)
    llm = LLM(**arguments(request))
    _check_switch(request.device)
    return llm


def _check_switch(device: str) -> None:
    """Raise ValueError if `SWITCH` is on but the started engine has no batch-invariant kernels that can run."""
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if os.environ.get(SWITCH) != "1" or (batch_invariance() and HAS_TRITON):
        return
    why = "its kernels need Triton, which it does not find" if batch_invariance() else "it replaced no kernel"
    raise ValueError(f"vLLM {vllm.__version__} does not support {SWITCH}=1 on {device}: {why}")


def batch_invariance() -> bool:
    """Whether `SWITCH` made vLLM replace kernels, read from the vLLM module that replaces them."""
    module = sys.modules.get("vllm.model_executor.determinism.batch_invariant")
    return bool(getattr(module, "_batch_invariant_MODE", False))


def arguments(request: LoadRequest) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`: defaults for the simplest path through the engine, and the user's settings.

    The user's settings take precedence.

    Raises:
        ValueError: neither the config nor the settings give the longest sequence.
    """
    whole = _config(request)
    config = text_config(whole)
    given = {key: value for key, value in request.settings.items() if key not in OWN_SETTINGS}
    limit = int(getattr(config, "max_position_embeddings", 0)) or None
    asked = given.pop("max_model_len", None) or limit
    if asked is None:
        raise ValueError("the config gives no longest text: say vllm,max_model_len=TOKENS")
    length = int(asked) if limit is None else min(int(asked), limit)
    if "hf_overrides" in given:
        given["hf_overrides"] = typed(given["hf_overrides"], config)
    chosen: dict[str, Any] = {
        "model": load_name(request.checkpoint),
        "dtype": request.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": max(2 * length, MIN_BATCHED_TOKENS),
    }
    if request.device == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # With an explicit size of the cache, vLLM also skips its profiling run.
        rows, block = int(given.get("max_num_seqs", ROWS)), int(given.get("block_size", BLOCK))
        chosen["kv_cache_memory_bytes"] = cache_bytes(
            config, length, str(given.get("dtype", request.dtype)), rows, block
        )
    if config is not whole:
        chosen["language_model_only"] = True
    if world_size(request.settings) > 1:
        chosen["distributed_executor_backend"] = "mp"
    if request.settings.get(FORCED_DECODING):
        chosen["logits_processors"] = [forced_decoding()]
        given["logprobs_mode"] = "raw_logprobs"
    return chosen | given


@contextmanager
def tokens_per_step(llm: Any, most: int | None) -> Iterator[None]:
    """Limit a step of the scheduler to `most` tokens, so that longer prompts run in chunks; None keeps its own limit."""
    if most is None:
        yield
        return
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = most
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def typed(overrides: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return config overrides with each whole number as an int or a float, whichever the config has under that key.

    This is needed because transformers refuses 256.0 for an int and 50 for a float.
    """
    first = layer_configs(config)[0]  # a value that differs between layers is absent from the model's config
    return {
        key: typed(value, config) if key == TEXT_MODEL else _like(value, getattr(first, key, None))
        for key, value in overrides.items()
    }


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, which is the config of the model if layers have none of their own."""
    own = getattr(config, "per_layer_config", None)
    return [own[layer] if own else config for layer in range(config.num_hidden_layers)]


def _like(value: Any, old: Any) -> Any:
    numbers = isinstance(value, (int, float)) and isinstance(old, (int, float))
    if not numbers or isinstance(value, bool) or isinstance(old, bool) or value != int(value):
        return value
    return type(old)(value)


def cache_bytes(config: Any, length: int, dtype: str, rows: int = ROWS, block: int = BLOCK) -> int:
    """Return the bytes of a key-value cache for a sequence of `length` tokens and `rows` short ones of `BLOCK` tokens."""
    size = getattr(torch, dtype, torch.float32).itemsize
    short = -(-BLOCK // block) * rows
    blocks = -(-length // block) + short
    return int(2 * sum(map(_key_width, layer_configs(config))) * size * blocks * block)


def _key_width(config: Any) -> int:
    """Return how many numbers the keys of one token have in a layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def check_settings(settings: dict[str, Any]) -> None:
    """Check that vLLM knows the settings; vLLM itself would refuse them only after seconds, or with a list of 200 names.

    Raises:
        BackendFailed: vLLM does not know a setting.
    """
    from vllm.engine.arg_utils import EngineArgs

    require_settings(settings, [*EngineArgs.__dataclass_fields__, *OWN_SETTINGS], "vLLM")


def _check_experts(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if experts would be distributed over ranks whose kernel cannot know which experts its rank holds.

    vLLM 0.32's `cpu_fused_moe` gets the router's choice among all experts and the weights of the rank's own experts,
    but no map from one to the other. It therefore reads past the end of the weights, and the rank crashes.
    """
    if not settings.get(EXPERT_PARALLEL) or world_size(settings) == 1:
        return
    importlib.import_module("vllm._custom_ops")  # registers the kernels
    kernel = getattr(torch.ops._C, EXPERTS_KERNEL, None)
    if kernel is not None and EXPERT_MAP not in str(kernel.default._schema):
        raise ValueError(
            f"vLLM's CPU engine cannot run {EXPERT_PARALLEL}: its kernel {EXPERTS_KERNEL} takes no map of a rank's experts"
        )


def _config(request: LoadRequest) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(load_name(request.checkpoint))


def _inspect_in_process(architecture: str) -> None:
    """Import the model class that vLLM has for an architecture, and register it again as an imported class.

    vLLM inspects a class that is not imported yet in a separate process, to avoid initialising CUDA. That takes
    eight seconds and is not needed here, because this function is only used on the CPU.
    """
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models.get(architecture)
    if found is not None:
        ModelRegistry.register_model(architecture, found.load_model_cls())
