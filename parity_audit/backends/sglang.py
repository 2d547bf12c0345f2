"""SGLang's own scheduler and model, in this process.

Each row of a probe is sent as an ordinary request without padding. Hooks on the engine's own modules record the sites,
and replace them if a replay asks for it. The engine's tensors are `[token, d]`, so `vllm_gather` puts them back into
`[batch, pos]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from parity_audit.backends import sglang_engine, sglang_settings
from parity_audit.backends.base import Tell
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.loading import tokenization
from parity_audit.backends.modes import not_run
from parity_audit.backends.operation_case import HeadCall
from parity_audit.backends.reach import run_as_far_as_it_goes
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.text_model import paths_of_part, text_part
from parity_audit.backends.vllm_gather import StepGatherer, hooks_of_the_whole, prompts_of
from parity_audit.backends.vllm_weights import parameter_count
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.core.rollouts import SampleReply, SampleRequest
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import FLOAT64, ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

SHOWN_SETTINGS = (
    "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "context_length", "max_total_tokens", "page_size",
    "disable_radix_cache", "disable_overlap_schedule", "chunked_prefill_size", "tp_size", "quantization",
    "speculative_algorithm", "enable_torch_compile", "enable_fp32_lm_head",
)  # fmt: skip
CACHED_TOKENS = "cached_prompt_tokens"


class SglangBackend:
    """SGLang's scheduler, by default without radix cache and graphs; the settings are passed to `ServerArgs`."""

    request: LoadRequest
    engine: sglang_engine.Engine
    head: sglang_engine.Head
    model: Any

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def prepare(self, request: LoadRequest) -> None:
        """Import SGLang with the environment variables for the request's device; this is most of the start time."""
        sglang_settings.set_environment(request.device)
        importlib.import_module("sglang.srt.managers.scheduler")

    def load(self, request: LoadRequest) -> None:
        """Load the model; the environment variables are set before SGLang is imported."""
        self.prepare(request)
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        self.engine = sglang_engine.Engine(request)
        self.model = text_part(self.engine.model)

    def describe(self) -> Description:
        """Return versions, the settings in force (attention kernel included), and live knob values."""
        model = self.model
        settings = {**self.request.settings, **self.engine.settings(SHOWN_SETTINGS)}
        found = versions("sglang", "transformers", "triton")
        return Description(
            backend="sglang", package="sglang", version=found["sglang"], versions=found, settings=settings,
            not_run=not_run("sglang", settings), effective=effective(model, self.request.reads),
            tokenization=tokenization(self.request), max_positions=self.engine.longest,
            numerics=numerics(next(model.parameters()).dtype), parameters=parameter_count(model),
            text_paths=paths_of_part(self.engine.model),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run the probe's rows as one batch of requests, up to the longest request that the engine takes.

        Raises:
            NotImplementedError: float64 was asked for; the engine has no such kernels.
        """
        return run_as_far_as_it_goes(request, self.engine.longest, self._whole, past=False)

    replay = run

    @torch.no_grad()
    def _whole(self, request: RunRequest) -> RunReply:
        """Run one batch of requests that the engine takes whole; see `run`."""
        if request.precision == FLOAT64:
            raise NotImplementedError("SGLang cannot be the judge: it has no float64 kernels")
        recorder = Recorder(request)
        gatherer = StepGatherer(request, recorder)
        self.head = head = sglang_engine.Head(self.model.logits_processor, gatherer.sampler(forced=request.cached))
        with ExitStack() as stack:
            stack.enter_context(hooks_of_the_whole(self.engine.model))
            stack.enter_context(gatherer.steps_seen(self.engine.model))
            stack.enter_context(hooked(self.model, gatherer, self.engine.model))
            stack.callback(head.processor.register_forward_hook(head.seen, with_kwargs=True).remove)
            stack.enter_context(self.engine.tokens_per_step(request.chunk))
            cached = self._generate(request, gatherer.rows)
        gatherer.finish(head)
        return replace(recorder.reply(), facts={**gatherer.largest, CACHED_TOKENS: cached})

    def _generate(self, request: RunRequest, rows: list[list[int]]) -> int:
        """Run the rows as prompts; a decoded probe runs its prompt as a whole and the other tokens one by one.

        Returns the number of prompt tokens that came from the radix cache, by the engine's own counter.
        """
        prompts, decoded = prompts_of(request, rows)
        sampling = replace(sglang_engine.GREEDY, max_new_tokens=decoded + 1)
        done = self.engine.generate(prompts, sampling, keep_cache=request.keep_cache)
        return sum(one.cached_tokens for one in done)

    def head_call(self) -> HeadCall:
        """Return the head and the hidden states that it was given in the last step of the last run."""
        assert self.head.hidden is not None
        return HeadCall("logits_processor", self.head, self.head.hidden)

    @torch.no_grad()
    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Draw completions without log-probabilities; only SGLang's server (`sglang_server`) returns those."""
        rows = [ids for ids in request.prompts for _ in range(request.sampling.samples)]
        done = self.engine.generate(rows, request.sampling)
        return SampleReply(completions=tuple(sglang_engine.completion(one) for one in done))

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Apply live edits to the running model.

        Edits that are made when the model is loaded (`json_model_override_args`) need a new engine, which the parent
        starts.
        """
        return self.edits.bring_to(self.model, request.edits)
