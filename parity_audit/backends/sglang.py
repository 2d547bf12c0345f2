"""SGLang's own model runner, in this process.

Probes go in as ordinary requests, one per row and without padding; hooks on the engine's own modules show the sites, and
replace them where a replay asks for it. Tensors are `[token, d]`, so `vllm_gather` puts them back into `[batch, pos]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from parity_audit.backends import sglang_engine
from parity_audit.backends.base import Tell
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.loading import tokenization
from parity_audit.backends.modes import not_run
from parity_audit.backends.prints import fingerprints
from parity_audit.backends.reach import run_as_far_as_it_goes
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.vllm_gather import Gatherer
from parity_audit.backends.vllm_weights import parameter_count
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import FLOAT64, ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

SHOWN_SETTINGS = (
    "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "context_length", "max_total_tokens", "page_size",
    "disable_radix_cache", "chunked_prefill_size", "tp_size", "quantization", "speculative_algorithm", "enable_torch_compile",
    "enable_fp32_lm_head",
)  # fmt: skip
LOGITS_PROCESSOR = "logits_processor"


class SglangBackend:
    """A model runner without radix cache and graphs unless settings say otherwise; settings go to `ServerArgs`."""

    request: LoadRequest
    runner: sglang_engine.Runner

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def prepare(self, request: LoadRequest) -> None:
        """Import SGLang, in the environment that the request asks for: most of the time that a start takes."""
        sglang_engine.set_environment(request)
        importlib.import_module("sglang.benchmark.one_batch")

    def load(self, request: LoadRequest) -> None:
        """Load the model; the environment is set before SGLang is imported."""
        self.prepare(request)
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        self.runner = sglang_engine.Runner(request)

    def describe(self) -> Description:
        """Versions, the settings and attention kernel in force, and live knob values."""
        model = self.runner.model
        settings = {**self.request.settings, **self.runner.settings(SHOWN_SETTINGS)}
        found = versions("sglang", "transformers", "triton")
        return Description(
            backend="sglang", package="sglang", version=found["sglang"], versions=found, settings=settings,
            not_run=not_run("sglang", settings), effective=effective(model, self.request.reads),
            tokenization=tokenization(self.request), max_positions=self.runner.longest,
            numerics=numerics(next(model.parameters()).dtype), parameters=parameter_count(model),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Fingerprints of the live parameters."""
        return fingerprints(self.runner.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run the probe's rows as one batch of requests, as long as the engine takes them.

        Raises:
            NotImplementedError: float64 was asked for; the engine has no such kernels.
        """
        return run_as_far_as_it_goes(request, self.runner.longest, self._whole, past=False)

    replay = run

    @torch.no_grad()
    def _whole(self, request: RunRequest) -> RunReply:
        """One batch of requests; see `run`."""
        if request.precision == FLOAT64:
            raise NotImplementedError("SGLang cannot be the judge: it has no float64 kernels")
        if request.chunk is not None or request.keep_cache:
            raise NotImplementedError(
                "prompts in chunks and kept caches are SGLang's scheduler's, which is not run here"
            )
        model: Any = self.runner.model
        recorder = Recorder(request)
        gatherer, head = Gatherer(request, recorder), sglang_engine.Head(getattr(model, LOGITS_PROCESSOR))
        with ExitStack() as stack:
            stack.enter_context(hooked(model, gatherer))
            stack.callback(head.processor.register_forward_hook(head.seen, with_kwargs=True).remove)
            self._steps(gatherer, head, request.probe.decode_from if request.cached else None)
        gatherer.finish(head)
        return recorder.reply()

    def _steps(self, gatherer: Gatherer, head: sglang_engine.Head, prompt: int | None) -> None:
        """The rows as prompts; of a decoded probe its first `prompt` tokens, and then token by token."""
        rows = [row[:prompt] for row in gatherer.rows]
        gatherer.step([token for row in rows for token in row], [place for row in rows for place in range(len(row))])
        batch = self.runner.prompt(rows)
        gatherer.sampled_from(head.returned)
        if prompt is None:
            return
        for place, token in enumerate(gatherer.rows[0][prompt:], start=prompt):
            gatherer.step([token], [place])
            self.runner.token(batch, token)
            gatherer.sampled_from(head.returned)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Live edits; `load` edits (`json_model_override_args`) need a fresh engine, which the parent starts."""
        return self.edits.bring_to(self.runner.model, request.edits)
