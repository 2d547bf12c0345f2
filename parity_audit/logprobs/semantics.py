"""Findings about legs whose numbers are another quantity than training needs, notes, and the gaps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parity_audit.core.logprob_report import LogprobFinding
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.core.types import Description, NotTested
from parity_audit.logprobs.causes import SpecialTokens
from parity_audit.logprobs.legs import CACHED_TOKENS, DECODE, TRAINER, Scored
from parity_audit.logprobs.meaning import RAW, Decided, Meaning, policy
from parity_audit.logprobs.switches import EAGER, PREFIX_CACHE

UNTRIED = {
    PREFIX_CACHE: (False, "prefix cache", "it is off; --prefix-cache turns it on"),
    EAGER: (True, "compiled engine", "the engine runs eagerly; --engine-mode compiled compiles it"),
}
"""By engine setting: the value with which a path of the engine is not tested, the name of that path, and the reason."""
NOT_COMPILED = "NONE"
AFTER_TEMPERATURE: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"logprobs_mode": "processed_logprobs"},
    "sglang": {"return_original_logprob": False},
}
"""By engine: the load setting with which it returns the log-probabilities of sampled tokens after the temperature."""
HOW = {
    "vllm": "vLLM: logprobs_mode=processed_logprobs",
    "sglang": "SGLang: leave SGLANG_RETURN_ORIGINAL_LOGPROB unset (return_original_logprob=false)",
}
BEFORE = {
    "sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB=1 (return_original_logprob=true) gives those before the temperature"
}
"""Engines that return log-probabilities after the temperature, and the setting for those before it."""


def findings(
    sampling: Sampling, decided: Mapping[str, Decided], judge: Scored, engine: str = ""
) -> list[LogprobFinding]:
    """Return one finding per leg whose numbers are another quantity than a trainer's importance ratio needs.

    `engine` is the package that made the rollouts. If it is not known (""), the remedy of every engine is named.
    """
    wanted = policy(sampling)
    found = []
    for name in (DECODE, TRAINER):
        if name in decided and decided[name].clear and decided[name].meaning != wanted:
            found.append(_other_quantity(name, decided[name], wanted, judge, engine))
    return found


def _other_quantity(leg: str, decided: Decided, wanted: Meaning, judge: Scored, engine: str) -> LogprobFinding:
    own = decided.meaning
    evidence = {f"RMSE as {meaning.words}": left for meaning, left in decided.left}
    if own.truncated:
        kept = judge.by_meaning[wanted] - judge.by_meaning[own]
        return LogprobFinding(
            name="sampling.truncation", leg=leg, evidence={**evidence, "mean log of the kept share": float(kept.mean())},
            message="its log-probabilities are renormalised over the tokens that top-k and top-p keep; a trainer's are over "
            "the whole vocabulary, so every importance ratio carries the kept share",
            settings={"top_p": 1.0, "top_k": 0}, hint="sample without truncation, or truncate in the trainer too",
        )  # fmt: skip
    return LogprobFinding(
        name="logprobs.temperature", leg=leg, evidence=evidence,
        message=f"it gives the {own.words} for tokens drawn at temperature {wanted.temperature:g}; the ratio of training "
        "needs both sides at the sampling temperature",
        settings=dict(AFTER_TEMPERATURE.get(engine, {})) if own == RAW and leg == DECODE else {},
        hint=HOW.get(engine, "; ".join(HOW.values())) if leg == DECODE else "divide the logits by the temperature",
    )  # fmt: skip


def notes(
    special: SpecialTokens, completions: Sequence[Completion], defaults: Mapping[str, object],
    decided: Mapping[str, Decided], engine: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """Return notes about facts that change no number of this run but may matter to the user."""
    said = []
    own = decided.get(DECODE)
    if own is not None and own.clear and own.meaning.temperature != RAW.temperature and engine in BEFORE:
        said.append(
            f"sampled tokens come with the {own.meaning.words}, prompt tokens with those at temperature 1; {BEFORE[engine]}"
        )
    if special.bos is not None and any(one.prompt_ids[:2] == (special.bos, special.bos) for one in completions):
        said.append("a prompt begins with the beginning-of-sequence token twice; every leg was given it")
    if special.pad is not None and special.pad in special.eos:
        said.append("the padding token is an end-of-sequence token: a mask made from ids hides real tokens")
    if defaults:
        given = ", ".join(f"{key}={value}" for key, value in defaults.items())
        said.append(f"generation_config.json sets {given}: an engine asked without settings samples with them")
    return tuple(said)


def not_tested(
    engine: Description | None, decided: Mapping[str, Decided], facts: Mapping[str, Any]
) -> tuple[NotTested, ...]:
    """Return the gaps of a run: settings that the engine reports as not used, and meanings that these tokens cannot decide."""
    gaps = []
    if engine is None:
        gaps.append(
            NotTested(what="engine", why="the rollouts are a file's: its decode and prefill paths were not run")
        )
    else:
        gaps += [
            NotTested(what=what, why=why)
            for key, (untried, what, why) in UNTRIED.items()
            if engine.settings.get(key) == untried
        ]
        gaps += _without_effect(engine.settings, facts)
    for name, choice in decided.items():
        if not choice.clear:
            words = " or ".join(meaning.words for meaning, _ in choice.left[:2])
            gaps.append(NotTested(what=f"what the numbers of {name} are", why=f"these tokens do not tell: {words}"))
    return tuple(gaps)


def _without_effect(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> list[NotTested]:
    """Return gaps for settings that were on but had no effect, as the engine itself reports."""
    gaps = []
    if settings.get(PREFIX_CACHE) and not facts.get(CACHED_TOKENS):
        why = "it is on, and no prompt token came out of it, by the engine's own counter"
        gaps.append(NotTested(what="prefix cache", why=why))
    if settings.get(EAGER) is False and settings.get("compilation") == NOT_COMPILED:
        gaps.append(
            NotTested(what="compiled engine", why="enforce_eager is off, and the engine reports no compilation")
        )
    return gaps
