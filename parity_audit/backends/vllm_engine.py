"""How a vLLM engine is started: environment, arguments, and checks that give a readable error before a long start."""

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
"""Start the engine so that it can be told which tokens to decode; log-probabilities are then raw ones."""
SWITCH = "VLLM_BATCH_INVARIANT"
"""vLLM's own switch; which kernels it replaces is the engine's matter. On a CPU vLLM 0.32 takes Triton kernels that it has not."""
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")
EXPERT_PARALLEL, EXPERTS_KERNEL, EXPERT_MAP = "enable_expert_parallel", "cpu_fused_moe", "expert_map"
OWN_SETTINGS = ("tf32", FORCED_DECODING, BATCH_INVARIANT)
TEXT_MODEL = "text_config"
"""Where the config of a model of several modalities has that of its text model."""
BLOCK = 128
ROWS = 16
MIN_BATCHED_TOKENS = 2048
_imported_with: dict[str, str] = {}
"""The variables that vLLM was, or will be, imported with."""


def set_environment(settings: Mapping[str, Any], device: str) -> None:
    """Variables that vLLM reads when it is imported: one process, no telemetry, and float32 that is float32.

    Without `TRITON_F32_DEFAULT=ieee` the Triton attention kernel multiplies in TF32 and is off by 3e-3.

    Raises:
        RuntimeError: vLLM was imported in this process, or in the one that it is a copy of, with other variables.
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
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # as many ranks as one likes share the cores that there are
    if BATCH_INVARIANT in settings:
        chosen[SWITCH] = str(int(settings[BATCH_INVARIANT]))
    if _imported_with and _imported_with != chosen:
        raise RuntimeError(f"vLLM was imported with {_imported_with}, and these settings need {chosen}")
    _imported_with.update(chosen)
    os.environ.update(chosen)
    # Unless told the number of threads, vLLM goes down to one when its engine shares the caller's process.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def world_size(settings: Mapping[str, Any]) -> int:
    """How many processes the model is cut over."""
    return math.prod(int(settings.get(key) or 1) for key in PARALLEL)


def start(request: LoadRequest) -> Any:
    """A running `vllm.LLM`; call `set_environment` first.

    Raises:
        BackendFailed: a setting that vLLM does not have, with the nearest one.
        Whatever vLLM raises for settings that it has and cannot satisfy.
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
    """Raise ValueError where the switch is on and the engine that was started has no batch-invariant kernels that can run."""
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if os.environ.get(SWITCH) != "1" or (batch_invariance() and HAS_TRITON):
        return
    why = "its kernels need Triton, which it does not find" if batch_invariance() else "it replaced no kernel"
    raise ValueError(f"vLLM {vllm.__version__} does not support {SWITCH}=1 on {device}: {why}")


def batch_invariance() -> bool:
    """Whether the switch replaced kernels, read from the module that replaces them."""
    module = sys.modules.get("vllm.model_executor.determinism.batch_invariant")
    return bool(getattr(module, "_batch_invariant_MODE", False))


def arguments(request: LoadRequest) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: the user's settings over ours, which choose the plainest path through the engine."""
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
        # An explicit size also skips the profiling run.
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
    """Let the engine's scheduler run at most so many tokens in a step, so that it cuts longer prompts into chunks."""
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
    """Whole numbers as the config has them: transformers refuses 256.0 for an int and 50 for a float."""
    first = layer_configs(config)[0]  # what layers do not share has no value in the config of the model
    return {
        key: typed(value, config) if key == TEXT_MODEL else _like(value, getattr(first, key, None))
        for key, value in overrides.items()
    }


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer: the model's where layers share all of it."""
    own = getattr(config, "per_layer_config", None)
    return [own[layer] if own else config for layer in range(config.num_hidden_layers)]


def _like(value: Any, old: Any) -> Any:
    numbers = isinstance(value, (int, float)) and isinstance(old, (int, float))
    if not numbers or isinstance(value, bool) or isinstance(old, bool) or value != int(value):
        return value
    return type(old)(value)


def cache_bytes(config: Any, length: int, dtype: str, rows: int = ROWS, block: int = BLOCK) -> int:
    """Bytes of a key-value cache that holds one sequence of `length` tokens and a batch of `rows` short ones."""
    size = getattr(torch, dtype, torch.float32).itemsize
    short = -(-BLOCK // block) * rows
    blocks = -(-length // block) + short
    return int(2 * sum(map(_key_width, layer_configs(config))) * size * blocks * block)


def _key_width(config: Any) -> int:
    """Numbers of one token's keys in a layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that vLLM would only refuse after seconds, or with a list of two hundred names.

    Raises:
        BackendFailed: an unknown setting.
    """
    from vllm.engine.arg_utils import EngineArgs

    require_settings(settings, [*EngineArgs.__dataclass_fields__, *OWN_SETTINGS], "vLLM")


def _check_experts(settings: Mapping[str, Any]) -> None:
    """Raise ValueError where experts would be dealt out over ranks whose kernel does not know which of them it has.

    vLLM 0.32's `cpu_fused_moe` is given the router's choice among all experts and the weights of a rank's own, and no map
    between them: it reads past their end, and the rank dies of it.
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
    """Register the model class that vLLM would find anyway, already imported.

    vLLM looks at a class it has not seen before in a process of its own, so as not to initialise CUDA; that
    costs eight seconds, and there is no CUDA here.
    """
    from vllm.model_executor.models import ModelRegistry

    found = ModelRegistry.models.get(architecture)
    if found is not None:
        ModelRegistry.register_model(architecture, found.load_model_cls())
