"""Run both sides again with changed settings: the trainer scores the tokens again, the engine is started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity_audit.core.errors import NotJudged
from parity_audit.core.logprob_report import Attribution, EngineMode
from parity_audit.core.rollouts import ScoreReply, ScoreRequest
from parity_audit.core.types import Edit
from parity_audit.core.wire import NATIVE
from parity_audit.logprobs import legs, verdict
from parity_audit.logprobs.attribution import AGAIN, attribute
from parity_audit.logprobs.context import Context
from parity_audit.logprobs.meaning import RAW, Decided
from parity_audit.logprobs.paired import Array
from parity_audit.logprobs.switches import PREFIX_CACHE, TOGGLES, engine_switches, joined, trainer_switches
from parity_audit.specs.view import dims

FORCED_DECODING = "forced_decoding"
"""The load setting that makes an engine decode given tokens instead of sampling."""
NO_HIT = "no prompt token came out of the prefix cache, by the engine's own counter"
CAN_BE_TOLD = ("vllm",)
"""Engines that have `FORCED_DECODING`; for other engines the prefill leg is run again."""


def modes(
    context: Context, tested: legs.LegsUnderTest, native: legs.Scored, decided: Mapping[str, Decided]
) -> tuple[EngineMode, ...]:
    """Run the engine with the other value of each setting that the user chose, and compare the two.

    Each entry also holds the engine's own report that the chosen value was in force.
    """
    if context.engine is None or not context.asked:
        return ()
    settings = tested.settings
    leg = _repeatable(context, decided)
    train = native.by_meaning[decided[leg].meaning]
    said = tested.facts if leg == legs.DECODE else tested.prefill_facts
    found = []
    for key in context.asked:
        other = {key: not settings[key]}
        context.trainer.release()
        context.progress.update("verify", f"engine with {_words(other)}")
        try:
            values, gap = _engine(context, tested, leg, other), ""
        except NotJudged as error:
            values, gap = None, error.message
        if key == PREFIX_CACHE and settings[key] and not said.get(legs.CACHED_TOKENS):
            values, gap = None, NO_HIT
        on, off = TOGGLES[key]
        found.append(
            EngineMode(
                name=on if settings[key] else off, leg=leg, setting=key, value=bool(settings[key]),
                proof=_proof(key, settings, said), rmse=verdict.rmse(tested.values[leg], train),
                other_rmse=None if values is None else verdict.rmse(values, train),
                moved=None if values is None else float(np.abs(values - tested.values[leg]).max()), gap=gap,
            )
        )  # fmt: skip
    context.engine.discard()
    return tuple(found)


def _repeatable(context: Context, decided: Mapping[str, Decided]) -> str:
    """Return the leg that can be run again on the same tokens.

    That is the decode leg if the engine can decode given tokens and samples with raw log-probabilities, else the prefill leg.
    """
    told = context.engine is not None and context.engine.plan.ref.name in CAN_BE_TOLD
    return legs.DECODE if told and decided[legs.DECODE].meaning == RAW else legs.PREFILL


def _proof(key: str, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return, in words, what the engine itself reports about a setting."""
    if key == PREFIX_CACHE:
        return f"{facts.get(legs.CACHED_TOKENS) or 0} prompt tokens came out of the cache, by the engine's counter"
    return f"the engine reports compilation={settings.get('compilation')}"


def attributed(
    context: Context, tested: legs.LegsUnderTest, native: legs.Scored, decided: Mapping[str, Decided]
) -> Attribution:
    """Find the switches that explain the distance between the engine's log-probabilities and the trainer's.

    The decode leg is used, because training divides by its probabilities. If it consists of raw log-probabilities and the
    engine can decode given tokens, it can be decoded again with other settings. Otherwise the prefill leg stands for the
    engine. Of a rollout file only the trainer's switches are tried.
    """
    assert context.target is not None
    engine = context.engine
    leg = legs.DECODE if engine is None else _repeatable(context, decided)
    meaning = decided[leg].meaning

    def trainer_again(changes: Mapping[str, Any]) -> Array:
        if not changes:
            return native.by_meaning[meaning]
        if engine is not None:
            engine.release()  # one model in memory at a time
        context.progress.update("attribute", f"trainer with {_words(changes)}")
        return context.scored(tested.completions, NATIVE, replace(context.base, **changes)).by_meaning[meaning]

    def engine_again(changes: Mapping[str, Any]) -> Array:
        if not changes:
            return tested.values[leg]
        context.trainer.release()
        context.progress.update("attribute", f"engine with {_words(changes)}")
        return _engine(context, tested, leg, {key: value for key, value in changes.items() if key != AGAIN})

    about = context.trainer.description()
    trainer = trainer_switches(
        context.plan.dtype, str(about.settings.get("attn_implementation")), context.base,
        experts=bool(dims(context.plan.model.spec, context.plan.config).get("n_experts")),
    )  # fmt: skip
    switches = joined(trainer, [] if engine is None else engine_switches(tested.settings))
    sequence = np.repeat(np.arange(len(tested.completions)), [len(one.token_ids) for one in tested.completions])
    try:
        return attribute(
            leg, sequence, switches, trainer=trainer_again, engine=engine_again, target=context.target,
            repeatable=engine is not None,
        )  # fmt: skip
    finally:
        if engine is not None:
            engine.discard()


def _engine(context: Context, tested: legs.LegsUnderTest, leg: str, settings: dict[str, Any]) -> Array:
    """Return the engine's leg with other load settings, `[token]`.

    With a prefix cache the tokens are scored twice, because the first pass fills the cache. If the second pass takes no
    token from the cache, NotJudged is raised.
    """
    session = context.engine
    assert session is not None
    decoded = leg == legs.DECODE
    session.apply((Edit(op="load", value={**settings, **({FORCED_DECODING: True} if decoded else {})}),))
    ask: Callable[[], ScoreReply] = lambda: session.score(ScoreRequest(completions=tested.completions, decoded=decoded))  # noqa: E731
    reply = ask()
    if settings.get(PREFIX_CACHE):
        reply = ask()
        if not reply.facts.get(legs.CACHED_TOKENS):
            raise NotJudged(NO_HIT, code="no-cache-hit")
    return legs.flat([score.logprobs[0] for score in reply.scores])


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items())
