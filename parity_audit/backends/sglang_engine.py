"""How SGLang's model runner is started in this process, and how it is given a batch of rows.

The runner is what SGLang's scheduler drives: the real model code, paged key-value pool, attention backend and logits
processor. It is built the way SGLang's own one-batch benchmark builds it, with that module's functions, because they are
what each release adapts to its own internals. The scheduler, its radix cache and the HTTP server are not part of it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parity_audit.backends.loading import load_name
from parity_audit.core.wire import LoadRequest

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
OVERRIDES = "json_model_override_args"
"""The setting of SGLang that replaces keys of the checkpoint's config; JSON text there, a mapping in a BACKEND string."""
OWN_SETTINGS = ("tf32",)
ROWS = 16
SPARE_TOKENS = 2048
"""Tokens of the key-value pool beside those of the longest row: a batch of short rows fits as well."""
PLAINEST = {
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "chunked_prefill_size": -1,
    "random_seed": 0,
    "log_level": "error",
}
"""The plainest path through the engine: nothing is cached across requests and every prompt runs whole."""
ON_CPU = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "mem_fraction_static": 0.9}
"""The only attention kernel and sampler that run on a CPU without the compiled CPU kernels.

The share of memory is a bound and not an allocation, since the number of tokens in the pool is given; what SGLang would
choose by itself comes out negative where prompts are not cut into chunks.
"""


def set_environment(request: LoadRequest) -> None:
    """Variables that SGLang reads when it is imported."""
    if request.device == "cpu":
        os.environ[CPU_ENGINE] = "1"


def arguments(request: LoadRequest) -> dict[str, Any]:
    """Arguments of `ServerArgs`: the user's settings over ours.

    Raises:
        ValueError: a setting that SGLang does not have, with the nearest one.
    """
    given = {key: value for key, value in request.settings.items() if key not in OWN_SETTINGS}
    check_settings(given)
    if isinstance(given.get(OVERRIDES), dict):
        given[OVERRIDES] = json.dumps(given[OVERRIDES])
    length = _length(request, given.pop("context_length", None))
    chosen: dict[str, Any] = {
        **PLAINEST, **(ON_CPU if request.device == "cpu" else {}), "model_path": load_name(request.checkpoint),
        "device": request.device, "dtype": request.dtype, "context_length": length, "max_running_requests": ROWS,
        "max_total_tokens": length + SPARE_TOKENS,
    }  # fmt: skip
    return chosen | given


def _length(request: LoadRequest, asked: Any) -> int:
    """Positions of the longest row: what was asked for, as far as the checkpoint's config goes."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(load_name(request.checkpoint)).get_text_config()
    own = next(
        (int(value) for key in ("max_position_embeddings", "n_positions") if (value := getattr(config, key, 0))), 0
    )
    return min(int(asked), own) if asked and own else int(asked or own)


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse what SGLang would only refuse after seconds, as an unexpected keyword.

    Raises:
        ValueError: an unknown setting.
    """
    from sglang.srt.server_args import ServerArgs

    known = [*inspect.signature(ServerArgs).parameters, *OWN_SETTINGS]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"`{key}` is not a setting of SGLang" + (f"; did you mean `{near[0]}`?" if near else ""))


class Runner:
    """A loaded model, its key-value pool, and the two steps of a batch: a prompt, then one token at a time."""

    def __init__(self, request: LoadRequest) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.steps: Any = one_batch
        self.args: Any = ServerArgs(**arguments(request))
        self.args.resolve_once()
        one_batch._set_envs_and_config(self.args)
        ports = PortArgs.init_new(self.args)
        world = one_batch.spawn_world_rank(self.args, tp_rank=0, pp_rank=0)
        one_batch.publish(self.args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world, gpu_id=0))
        one_batch._init_process_global_configs()
        with _without_tokenizer(one_batch):
            loaded, _ = one_batch.load_model(self.args, ports, 0, 0)
        self.runner: Any = loaded.torch_runner
        self.model: torch.nn.Module = self.runner.model
        self.longest = int(self.runner.model_config.context_len)

    def prompt(self, rows: Sequence[Sequence[int]]) -> Any:
        """Run the rows as prompts, in one step; returns the batch that `token` goes on with."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        requests = self.steps.prepare_synthetic_inputs_for_latency_test(
            len(rows), len(rows[0]), [list(row) for row in rows]
        )
        _, _, batch = self.steps.extend(requests, self.runner)
        return batch

    def token(self, batch: Any, token: int) -> None:
        """Run one more token of the batch's only row, from the cache."""
        self.steps.decode(torch.tensor([token], device=self.runner.device), batch, self.runner)

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Settings in force, of those that this release has."""
        return {name: _plain(getattr(self.args, name)) for name in names if hasattr(self.args, name)}


class Head:
    """The engine's own logits processor, asked for more tokens than it computes for itself.

    What it is called with last (the head's weights, the batch) is kept, and used again for the logits of any hidden
    states. `returned` is what it gave its sampler: `[request d_vocab]`, for the last token of each request of a step.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.weights: Any = None
        self.batch: Any = None
        self.returned: Tensor | None = None

    def seen(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook of the logits processor."""
        self.weights, self.batch = args[2:4]
        self.returned = output.next_token_logits

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[token d_vocab]` of final-norm outputs `[token d_model]`."""
        from sglang.srt.layers.logits_processor import LogitsMetadata

        device = next(iter(self.weights.parameters())).device
        facts = LogitsMetadata.from_forward_batch(self.batch)
        logits: Tensor = self.processor._get_logits(hidden.to(device), self.weights, facts)
        return logits


@contextmanager
def _without_tokenizer(steps: Any) -> Any:
    """The benchmark loads a tokenizer that nothing here uses, and that a checkpoint need not have."""
    original, steps.get_tokenizer = steps.get_tokenizer, lambda *args, **kwargs: None
    try:
        yield
    finally:
        steps.get_tokenizer = original


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
