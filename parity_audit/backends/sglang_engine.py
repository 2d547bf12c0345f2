"""Start SGLang's scheduler in this process and give it requests.

Every SGLang server runs this scheduler. It forms batches, cuts prompts into chunks and keeps the radix cache, and it
runs the real model code, the paged key-value pool, the attention backend, the logits processor and the sampler. It is
driven one step after another, as its own event loop drives it. The tokenizer and HTTP server, which are other
processes, are not started; the results are read from the scheduler's request objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from parity_audit.backends import sglang_settings
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.core.wire import LoadRequest

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class Engine:
    """A loaded model and the scheduler that runs requests through it."""

    def __init__(self, request: LoadRequest) -> None:
        from sglang.srt.entrypoints.engine import _set_envs_and_config
        from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.args: Any = ServerArgs(**sglang_settings.arguments(request))
        self.args.resolve_once()
        _set_envs_and_config(self.args)
        world = spawn_world_rank(self.args, tp_rank=0, pp_rank=0)
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=world, dp_rank=None, gpu_id=0))
        self.scheduler: Any = Scheduler(self.args, PortArgs.init_new(self.args))
        self.scheduler.ipc_channels.send_to_detokenizer.socket = None  # no detokenizer process listens
        self.model: Any = self.scheduler.tp_worker.model_runner.model
        self.longest = int(self.scheduler.max_req_input_len)

    def generate(self, rows: Sequence[Sequence[int]], sampling: Sampling, *, keep_cache: bool = False) -> list[Any]:
        """Run the rows as simultaneous requests until all are finished, and return the scheduler's request objects.

        Args:
            rows: token ids of each prompt.
            sampling: how tokens are drawn.
            keep_cache: leave the contents of the radix cache; otherwise it is emptied first.

        Raises:
            BackendFailed: the scheduler refused a request.
        """
        scheduler = self.scheduler
        if not keep_cache:
            scheduler.flush_cache()
        scheduler.process_input_requests([_request(number, row, sampling) for number, row in enumerate(rows)])
        requests = list(scheduler.waiting_queue)
        while not all(request.finished() for request in requests):
            self._step()
        self._step()  # removes the finished requests from the running batch
        for request in requests:
            reason = request.finished_reason.to_json()
            if reason["type"] == "abort":
                raise BackendFailed(f"SGLang refused a request: {reason.get('message')}")
        return requests

    def _step(self) -> None:
        """Run one iteration of the scheduler's event loop."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch

    @contextmanager
    def tokens_per_step(self, most: int | None) -> Iterator[None]:
        """Limit a step to `most` prompt tokens, so that longer prompts run in chunks; None keeps the limit as it is."""
        before = self.scheduler.chunked_prefill_size
        self.scheduler.chunked_prefill_size = before if most is None else most
        try:
            yield
        finally:
            self.scheduler.chunked_prefill_size = before

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the values in force of those settings in `names` that this release has, and the page size."""
        asked = {name: _plain(getattr(self.args, name)) for name in names if hasattr(self.args, name)}
        return {**asked, "page_size": self.scheduler.page_size}


def _request(number: int, row: Sequence[int], sampling: Sampling) -> Any:
    """Return a request for the scheduler, as the tokenizer's process would send it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    settings = SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k or -1,
        max_new_tokens=sampling.max_new_tokens, ignore_eos=sampling.ignore_eos,
    )  # fmt: skip
    settings.normalize(None)
    return TokenizedGenerateReqInput(
        rid=f"row-{number}", input_text=None, input_ids=array("q", row), input_embeds=None, mm_inputs=None,
        sampling_params=settings, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, token_type_ids=None, stream=False,
    )  # fmt: skip


def completion(request: Any) -> Completion:
    """Return the prompt, the generated tokens and the finish reason of a finished request."""
    return Completion(
        prompt_ids=tuple(request.origin_input_ids), token_ids=tuple(request.output_ids),
        finish_reason=str(request.finished_reason.to_json()["type"]),
    )  # fmt: skip


class Head:
    """Computes logits of any hidden states with the engine's own logits processor.

    The engine itself computes logits for the last token of each request only. The arguments of the processor's last
    call (hidden states `[token d_model]`, the head's weights, the batch) are kept and used again. In each step
    `sampled_from` is called with the logits `[request d_vocab]` that the engine is about to sample from, one row per
    request. If it returns a tensor, the engine samples from that instead.
    """

    def __init__(self, processor: Any, sampled_from: Callable[[Tensor], Tensor | None]) -> None:
        self.processor, self.sampled_from = processor, sampled_from
        self.hidden: Tensor | None = None
        self.weights: Any = None
        self.batch: Any = None

    def seen(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook of the logits processor: keep its arguments, and replace its logits if `sampled_from` does."""
        self.hidden, self.weights, self.batch = args[1:4]
        forced = self.sampled_from(output.next_token_logits)
        if forced is not None:
            output.next_token_logits = forced

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits `[token d_vocab]` of final-norm outputs `[token d_model]`."""
        from sglang.srt.layers.logits_processor import LogitsMetadata

        device = next(iter(self.weights.parameters())).device
        facts = LogitsMetadata.from_forward_batch(self.batch)
        logits: Tensor = self.processor._get_logits(hidden.to(device), self.weights, facts)
        return logits


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
