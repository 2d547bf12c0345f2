"""How SGLang's scheduler is started in this process, and how it is given requests.

The scheduler is what every SGLang server runs: batches, prompts in chunks, the radix cache, and below it the real model code,
paged key-value pool, attention backend, logits processor and sampler. It is driven as its own event loop drives it, one step
after another. The processes around it (tokenizer, HTTP server) are not part of it, and its answers are read off its requests.
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
        self.scheduler.ipc_channels.send_to_detokenizer.socket = None  # nobody listens there
        self.model: Any = self.scheduler.tp_worker.model_runner.model
        self.longest = int(self.scheduler.max_req_input_len)

    def generate(self, rows: Sequence[Sequence[int]], sampling: Sampling, *, keep_cache: bool = False) -> list[Any]:
        """Run the rows as requests that come in at once, until each has its tokens; the scheduler's own requests, finished.

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
        self._step()  # lets go of what has finished
        for request in requests:
            reason = request.finished_reason.to_json()
            if reason["type"] == "abort":
                raise BackendFailed(f"SGLang refused a request: {reason.get('message')}")
        return requests

    def _step(self) -> None:
        """One turn of the scheduler's event loop."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch

    @contextmanager
    def tokens_per_step(self, most: int | None) -> Iterator[None]:
        """Let the scheduler run at most so many tokens of prompts in a step, so that it cuts longer prompts into chunks."""
        before = self.scheduler.chunked_prefill_size
        self.scheduler.chunked_prefill_size = before if most is None else most
        try:
            yield
        finally:
            self.scheduler.chunked_prefill_size = before

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Settings in force, of those that this release has."""
        asked = {name: _plain(getattr(self.args, name)) for name in names if hasattr(self.args, name)}
        return {**asked, "page_size": self.scheduler.page_size}


def _request(number: int, row: Sequence[int], sampling: Sampling) -> Any:
    """A request for the scheduler, as the tokenizer's process would send it."""
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
    """What a finished request generated."""
    return Completion(
        prompt_ids=tuple(request.origin_input_ids), token_ids=tuple(request.output_ids),
        finish_reason=str(request.finished_reason.to_json()["type"]),
    )  # fmt: skip


class Head:
    """The engine's own logits processor, asked for more tokens than it computes for itself.

    What it is called with last (hidden states `[token d_model]`, the head's weights, the batch) is kept, and used again for
    the logits of any hidden states. `sampled_from` is told what it gives its sampler: `[request d_vocab]`, for the last
    token of each request of a step. What that returns instead, the engine samples from.
    """

    def __init__(self, processor: Any, sampled_from: Callable[[Tensor], Tensor | None]) -> None:
        self.processor, self.sampled_from = processor, sampled_from
        self.hidden: Tensor | None = None
        self.weights: Any = None
        self.batch: Any = None

    def seen(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook of the logits processor."""
        self.hidden, self.weights, self.batch = args[1:4]
        forced = self.sampled_from(output.next_token_logits)
        if forced is not None:
            output.next_token_logits = forced

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[token d_vocab]` of final-norm outputs `[token d_model]`."""
        from sglang.srt.layers.logits_processor import LogitsMetadata

        device = next(iter(self.weights.parameters())).device
        facts = LogitsMetadata.from_forward_batch(self.batch)
        logits: Tensor = self.processor._get_logits(hidden.to(device), self.weights, facts)
        return logits


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
