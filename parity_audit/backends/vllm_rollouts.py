"""Completions drawn by vLLM, and its log-probabilities of given tokens.

Two legs of one engine: what sampling returned for each drawn token (decode), and what a prompt pass over the same ids
returns (prefill, `prompt_logprobs`). Prompt tokens pass no sampler, so the prefill leg is always at temperature 1. Given
tokens can be decoded again too, one by one: an engine that was started for it samples what it is told to.
"""

from __future__ import annotations

from typing import Any

from parity_audit.core.rollouts import Completion, SampleReply, SampleRequest, ScoreReply, ScoreRequest, Scores

SAMPLED_ONLY = 0
"""`logprobs=0` returns the log-probability of the drawn token and of no other."""
FORCED = "forced_tokens"
"""Key of a request's `extra_args`: the tokens that it decodes."""


def sample(llm: Any, request: SampleRequest) -> SampleReply:
    """Draw completions with explicit settings, so that a checkpoint's generation_config.json changes nothing."""
    from vllm import SamplingParams

    own = request.sampling
    settings = SamplingParams(
        n=own.samples, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k or -1, seed=own.seed,
        max_tokens=own.max_new_tokens, logprobs=SAMPLED_ONLY, detokenize=False, ignore_eos=own.ignore_eos,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in request.prompts], settings, use_tqdm=False)
    drawn = []
    for ids, output in zip(request.prompts, outputs, strict=True):
        if tuple(output.prompt_token_ids) != ids:
            raise ValueError(f"the engine was given {len(ids)} prompt tokens and used {len(output.prompt_token_ids)}")
        drawn += [_completion(ids, one) for one in output.outputs]
    return SampleReply(completions=tuple(drawn), facts={"cached_prompt_tokens": cached_tokens(outputs)})


def _completion(prompt: tuple[int, ...], output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    logprobs = tuple(float(row[token].logprob) for row, token in zip(output.logprobs, tokens, strict=True))
    return Completion(
        prompt_ids=prompt, token_ids=tokens, logprobs=logprobs, finish_reason=str(output.finish_reason or "")
    )


def score(llm: Any, request: ScoreRequest) -> ScoreReply:
    """Log-probabilities of the completions' tokens from one prompt pass each, and the likeliest token at each place.

    With `request.decoded` they come from the decode path instead, and nothing is said of the likeliest token.

    Raises:
        ValueError: another temperature than 1, or truncation, was asked for: prompt log-probabilities have neither.
    """
    from vllm import SamplingParams

    if request.temperatures != (1.0,) or request.truncation is not None:
        raise ValueError("prompt log-probabilities of vLLM are those of temperature 1 over the whole vocabulary")
    if request.decoded:
        return _decoded(llm, request)
    settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": [*one.prompt_ids, *one.token_ids]} for one in request.completions]
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    pairs = zip(request.completions, outputs, strict=True)
    scores = tuple(_scores(one, output) for one, output in pairs)
    return ScoreReply(scores=scores, facts={"cached_prompt_tokens": cached_tokens(outputs)})


def _decoded(llm: Any, request: ScoreRequest) -> ScoreReply:
    from vllm import SamplingParams

    settings = [
        SamplingParams(
            max_tokens=len(one.token_ids), temperature=0.0, logprobs=SAMPLED_ONLY, detokenize=False, ignore_eos=True,
            extra_args={FORCED: list(one.token_ids)},
        )
        for one in request.completions
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": list(one.prompt_ids)} for one in request.completions]
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    drawn = [
        _completion(one.prompt_ids, output.outputs[0]) for one, output in zip(request.completions, outputs, strict=True)
    ]
    for told, own in zip(request.completions, drawn, strict=True):
        if own.token_ids != told.token_ids:
            raise ValueError("the engine decoded other tokens than it was told to")
    return ScoreReply(
        scores=tuple(Scores(logprobs=(own.logprobs,)) for own in drawn),
        facts={"cached_prompt_tokens": cached_tokens(outputs)},
    )


def forced_decoding() -> type:
    """The logits processor of an engine that is to decode given tokens: it leaves only the next one of a request's list.

    It acts on what is sampled from, and raw log-probabilities are taken before it.
    """
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
        """One list of tokens per request, in its `extra_args`."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            tokens = (params.extra_args or {}).get(FORCED)
            return None if tokens is None else lambda done, logits: only(logits, tokens[len(done)])

    def only(logits: torch.Tensor, token: int) -> torch.Tensor:
        kept = torch.full_like(logits, float("-inf"))
        kept[token] = 0.0
        return kept

    return Forced


def _scores(completion: Completion, output: Any) -> Scores:
    rows = output.prompt_logprobs[len(completion.prompt_ids) :]
    given = zip(rows, completion.token_ids, strict=True)
    logprobs = tuple(float(row[token].logprob) for row, token in given)
    top1 = tuple(next(token for token, entry in row.items() if entry.rank == 1) for row in rows)
    return Scores(logprobs=(logprobs,), top1=top1)


def cached_tokens(outputs: Any) -> int | None:
    """Prompt tokens that the engine took from its prefix cache, by its own counter; None where it does not count."""
    counts: list[int | None] = [getattr(output, "num_cached_tokens", None) for output in outputs]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
