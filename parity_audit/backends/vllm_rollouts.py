"""Draw completions with vLLM, and get its log-probabilities of given tokens.

An engine returns log-probabilities on two paths, here called legs: for each token that it draws (the decode leg), and
for the tokens of a prompt (the prefill leg, `prompt_logprobs`). Prompt tokens do not pass the sampler, so the prefill
leg is always at temperature 1. Given tokens can also be decoded one by one: an engine that was started with
`forced_decoding` samples exactly the tokens that it is given.
"""

from __future__ import annotations

from typing import Any

from parity_audit.core.rollouts import Completion, SampleReply, SampleRequest, ScoreReply, ScoreRequest, Scores

SAMPLED_ONLY = 0
"""Value of vLLM's `logprobs` that returns the log-probability of the drawn token only."""
FORCED = "forced_tokens"
"""Key of a request's `extra_args` that holds the tokens that the request has to decode."""


def sample(llm: Any, request: SampleRequest) -> SampleReply:
    """Draw completions; all settings are explicit, so that a checkpoint's generation_config.json changes nothing.

    Raises:
        ValueError: the engine did not use the prompt tokens that it was given.
    """
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
    """Return the log-probability of each completion token, and the likeliest token at its position.

    Each completion is scored in one prompt pass (prefill). If `request.decoded` is true, the log-probabilities come
    from the decode path instead, and the likeliest token is not returned.

    Raises:
        ValueError: a temperature other than 1, or truncation, was asked for. Prompt log-probabilities are always those
            of temperature 1 over the whole vocabulary.
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
    """Return log-probabilities of the completions' tokens from the decode path; raise ValueError for other tokens."""
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
    """Return a logits processor class for an engine that has to decode given tokens.

    It allows only the next token of the request's list. It acts on the logits that are sampled from; raw
    log-probabilities are taken before it, and are therefore not changed.
    """
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
        """Forces the list of tokens that a request has in its `extra_args`; requests without a list are left alone."""

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
    """Return the number of prompt tokens that came from the prefix cache, by the engine's own counter.

    Returns None if the engine does not count them for every request.
    """
    counts: list[int | None] = [getattr(output, "num_cached_tokens", None) for output in outputs]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
