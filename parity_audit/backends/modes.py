"""Ways to run each backend that use other code to compute the outputs, and that a run does not cover.

A verdict holds only for the settings that were in force. The modes that these settings exclude are listed in the report, from
the tables below and the settings that the loaded backend reports, so that no reader takes the verdict to cover them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity_audit.core.types import NotTested

IN_FORCE = "this run had {setting}={value}"


@dataclass(frozen=True)
class Mode:
    """One way to run a backend, `what`, that a run does not cover while `setting` has one of the values in `while_in`.

    Without a `setting`, no run covers it, for the reason `why`. A setting that a backend does not report has the value None.
    """

    what: str
    setting: str = ""
    while_in: Sequence[Any] = ()
    why: str = ""


OTHER_KERNELS = tuple(
    Mode(
        f"attention kernel {kernel}",
        "attn_implementation",
        tuple(other for other in ("eager", "sdpa") if other != kernel),
    )
    for kernel in ("eager", "sdpa")
)
GENERATION = Mode(
    "generation loops", why="tokens are given, not chosen: samplers, beams and assisted decoding are not run"
)
COMPILED = Mode("compiled model", why="the modules run as they are, without torch.compile and without CUDA graphs")

MODES: Mapping[str, Sequence[Mode]] = {
    "hf": (
        *OTHER_KERNELS,
        Mode("flash and flex attention", "attn_implementation", (None, "eager", "sdpa")),
        Mode("static or quantised cache", why="decoded probes use the default cache of the release"),
        Mode("quantised weights", "quantization_config", (None,)),
        COMPILED,
        GENERATION,
    ),
    "hooked_transformer": (
        Mode("processed weights", "fold_ln", (None, False)),
        Mode("hooks of split inputs", "use_split_qkv_input", (None, False)),
        Mode("quantised weights", "load_in_4bit", (None, False)),
        COMPILED,
        GENERATION,
    ),
    "transformer_bridge": (
        *OTHER_KERNELS,
        Mode("compatibility mode", "compatibility_mode", (None, False)),
        COMPILED,
        GENERATION,
    ),
    "nnsight": (
        *OTHER_KERNELS,
        Mode("values read after the trace", why="each is written inside its trace, before the model can overwrite it"),
        Mode("remote execution, vLLM wrapper", why="the trace runs transformers in this process"),
        COMPILED,
        GENERATION,
    ),
    "vllm": (
        Mode("compiled mode, CUDA graphs", "enforce_eager", (True,)),
        Mode("eager mode", "enforce_eager", (False,)),
        Mode("hits of the prefix cache", why="the cache is emptied before every probe"),
        Mode("prefix caching", "enable_prefix_caching", (None, False)),
        Mode("prompts in chunks", why="max_num_batched_tokens holds every prompt whole"),
        Mode("speculative decoding", "speculative_config", (None,)),
        Mode("returned log-probs", why="logits are read before the sampler; logprobs, prompt_logprobs and logprobs_mode are not"),
        Mode("parallel engines", "tensor_parallel_size", (None, 1)),
        Mode("narrow key-value cache", "cache_dtype", (None, "auto")),
        Mode("quantised weights", "quantization", (None,)),
        Mode("preemption of requests", why="the key-value cache holds every probe at once"),
        Mode("server", why="the engine runs in this process, without the HTTP server"),
    ),
    "sglang": (
        Mode("compiled CPU kernels", "attention_backend", ("torch_native",),),
        Mode("CUDA kernels and CUDA graphs", "attention_backend", ("torch_native", "intel_amx")),
        Mode("compiled mode", "enable_torch_compile", (None, False)),
        Mode("radix cache", "disable_radix_cache", (True,)),
        Mode("hits of the radix cache", why="the cache is emptied before every probe"),
        Mode("prompts in chunks", why="chunked_prefill_size holds every prompt whole"),
        Mode("speculative decoding", "speculative_algorithm", (None,)),
        Mode("returned log-probs", why="logits are read before the sampler; `parity-audit logprobs --engine sglang` asks for those"),
        Mode("parallel engines", "tp_size", (None, 1)),
        Mode("narrow key-value cache", "kv_cache_dtype", (None, "auto")),
        Mode("quantised weights", "quantization", (None,)),
        Mode("overlapped scheduling", "disable_overlap_schedule", (True,)),
        Mode("preemption of requests", why="the key-value cache holds every probe at once"),
        Mode("server", why="the scheduler runs in this process, without the HTTP server"),
    ),
    "spec": (GENERATION,),
    "module": (COMPILED, GENERATION),
}  # fmt: skip


def not_run(kind: str, settings: Mapping[str, Any]) -> tuple[NotTested, ...]:
    """Return the modes that a run of a backend of this kind does not cover with these settings, each with the reason."""
    return tuple(
        NotTested(what=mode.what, why=_why(mode, settings))
        for mode in MODES[kind]
        if not mode.setting or settings.get(mode.setting) in mode.while_in
    )


def _why(mode: Mode, settings: Mapping[str, Any]) -> str:
    value = settings.get(mode.setting)
    if not mode.setting:
        return mode.why
    return (
        f"this run had no {mode.setting}"
        if value is None
        else IN_FORCE.format(setting=mode.setting, value=str(value).lower())
    )
