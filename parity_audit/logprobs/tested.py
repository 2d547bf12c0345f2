"""Take the legs under test: an engine's decode leg (it samples) and prefill leg (it scores its samples), or those of a file."""

from __future__ import annotations

from parity_audit.core.errors import NotJudged
from parity_audit.core.rollouts import SampleRequest, ScoreRequest
from parity_audit.logprobs import legs
from parity_audit.logprobs.context import Context
from parity_audit.logprobs.files.rollouts import Rollouts
from parity_audit.logprobs.switches import PREFIX_CACHE


def sampled(context: Context) -> legs.LegsUnderTest:
    """Sample with the engine, score the samples as prompts, and return both legs; the engine is released afterwards.

    With a prefix cache the engine samples twice and the second pass is used, because the first one fills the cache.
    """
    engine = context.engine
    assert engine is not None
    context.progress.update("sample", f"{len(context.prompts)} prompts on {engine.label}")
    request = SampleRequest(prompts=context.prompts, sampling=context.sampling)
    reply = engine.sample(request)
    settings = engine.description().settings
    if settings.get(PREFIX_CACHE):
        reply = engine.sample(request)  # the first pass filled the cache
    completions = legs.checked(reply.completions, vocabulary(context))
    if any(len(one.logprobs) != len(one.token_ids) for one in completions):
        raise NotJudged("the engine returned tokens without log-probabilities", code="no-logprobs")
    prefill = engine.score(ScoreRequest(completions=completions))
    engine.release()
    values = {
        legs.DECODE: legs.flat([one.logprobs for one in completions]),
        legs.PREFILL: legs.flat([score.logprobs[0] for score in prefill.scores]),
    }
    top1 = tuple(token for score in prefill.scores for token in score.top1)
    return legs.LegsUnderTest(
        completions=completions, values=values, prefill_top1=top1, facts=reply.facts,
        prefill_facts=prefill.facts, settings=settings,
    )  # fmt: skip


def given(rollouts: Rollouts, tokens: int) -> legs.LegsUnderTest:
    """Return the legs of a rollout file for a model with `tokens` token ids.

    Raises NotJudged if the completions cannot be scored (see `legs.checked`) or, in a file that also has the trainer's
    numbers, if a number cannot be compared.
    """
    completions = legs.checked(rollouts.completions, tokens)
    values = {legs.DECODE: legs.flat([one.logprobs for one in completions])}
    if rollouts.has_train:
        values[legs.TRAINER] = legs.flat(rollouts.train)
        legs.pair(completions, values[legs.DECODE], values[legs.TRAINER], "rollout and trainer of the file")
    return legs.LegsUnderTest(completions=completions, values=values)


def vocabulary(context: Context) -> int:
    """Return how many token ids the model has."""
    return int(context.plan.config["vocab_size"])
