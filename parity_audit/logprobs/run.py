"""Run one comparison: take the legs, decide what their numbers mean, measure distances to the judge, find causes, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK
from parity_audit.core.logprob_report import Divergence, Leg, LogprobFinding, LogprobReport, TokenTable
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Completion, Variation
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.logprobs import causes, legs, reporting, rerun, semantics, verdict, verification
from parity_audit.logprobs.context import Context
from parity_audit.logprobs.meaning import RAW, Decided, Meaning, decide
from parity_audit.logprobs.paired import Array, Paired
from parity_audit.logprobs.switches import steps_of
from parity_audit.logprobs.tested import given, sampled, vocabulary

WORST_SEQUENCES = 2
"""The number of sequences for the layer audit: each costs a whole run in which every site is captured."""
EXITS = {Verdict.EXACT: EXIT_OK, Verdict.PARITY: EXIT_OK, Verdict.MISMATCH: EXIT_MISMATCH}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The report, the tokens of its first pair (for files and plots), the scored completions, and the `worst` of these."""

    report: LogprobReport
    tokens: TokenTable
    completions: tuple[Completion, ...] = ()
    worst: tuple[Completion, ...] = ()


def run(context: Context) -> Answer:
    """Sample completions, or take those of a rollout file, score them, and compare the legs.

    Raises:
        NotJudged: a leg failed, or there are too few tokens.
    """
    started = time.perf_counter()
    tested = sampled(context) if context.rollouts is None else given(context.rollouts, vocabulary(context))
    context.progress.update("score", "the trainer's side, natively and as the judge")
    native = context.scored(tested.completions, NATIVE, context.base)
    judge = context.scored(tested.completions, FLOAT64, Variation())
    decided = {
        name: decide(values, judge.by_meaning if name != legs.PREFILL else {RAW: judge.by_meaning[RAW]})
        for name, values in tested.values.items()
    }
    found = _legs(context, tested, native, judge, decided)
    findings = [
        *semantics.findings(context.sampling, decided, judge, _program(context)["package"]),
        *_explained(context, tested, native, judge, decided, found),
    ]
    answer = _answer(context, tested, native, judge, decided, found, findings)
    checked = verification.verified(context, findings, verification.start(context, tested, native, judge))
    modes = rerun.modes(context, tested, native, decided)
    attribution = rerun.attributed(context, tested, native, decided) if context.target is not None else None
    seconds = {"total": time.perf_counter() - started}
    return dataclasses.replace(
        answer,
        report=dataclasses.replace(
            answer.report, findings=checked, modes=modes, attribution=attribution, seconds=seconds
        ),
    )


def _legs(
    context: Context, tested: legs.LegsUnderTest, native: legs.Scored, judge: legs.Scored, decided: dict[str, Decided]
) -> tuple[Leg, ...]:
    about = context.trainer.description()
    settings = {**about.settings, **steps_of(context.base)}
    own: dict[str, Any] = {"package": about.package, "version": about.version, "settings": settings}
    dtype = context.plan.dtype
    found = []
    for name, values in tested.values.items():
        meaning = decided[name].meaning
        truth, rounding = judge.by_meaning[meaning], native.by_meaning[meaning]
        found.append(
            Leg(
                name=name, dtype=dtype, meaning=meaning.words, rmse_to_judge=verdict.rmse(values, truth),
                noise_ratio=verdict.ratio(values, rounding, truth, dtype), **_program(context),
            )
        )  # fmt: skip
    used = {**own, "settings": {**settings, **native.facts}}
    scoring = "trainer" if legs.TRAINER not in tested.values else "rounding"
    rest = (
        Leg(
            name=scoring, backend=context.trainer.label, dtype=dtype, meaning=RAW.words, noise_ratio=1.0,
            rmse_to_judge=verdict.rmse(native.by_meaning[RAW], judge.by_meaning[RAW]), **used,
        ),
        Leg(name=legs.JUDGE, backend=context.trainer.label, dtype="float64", meaning=RAW.words, **own),
    )  # fmt: skip
    return (*found, *rest)


def _program(context: Context) -> dict[str, Any]:
    """Return the backend, package, version and settings of the program that produced the tested legs."""
    if context.engine is None:
        framework = context.rollouts.framework if context.rollouts else ""
        return {"backend": "file", "package": framework, "version": "", "settings": {}}
    about = context.engine.description()
    return {
        "backend": context.engine.label, "package": about.package, "version": about.version, "settings": about.settings,
    }  # fmt: skip


def _explained(
    context: Context,
    tested: legs.LegsUnderTest,
    native: legs.Scored,
    judge: legs.Scored,
    decided: dict[str, Decided],
    found: Sequence[Leg],
) -> list[LogprobFinding]:
    """Return the cause of each leg that departs; if both engine legs have the same cause, that is one finding."""
    findings: dict[str, LogprobFinding] = {}
    asked = causes.hypotheses(context.special, tested.completions, context.round_trip)
    for name in verdict.departing(found):
        meaning = decided[name].meaning
        context.progress.update("explain", name)

        def rescore(some: Sequence[Completion], variation: Variation, meaning: Meaning = meaning) -> Array:
            return context.scored(some, FLOAT64, variation).by_meaning[meaning]

        truth = judge.by_meaning[meaning]
        rounding = verdict.rmse(native.by_meaning[meaning], truth)
        cause = causes.explain(name, tested.values[name], truth, rounding, asked, rescore, tested.completions)
        other = findings.get(cause.name)
        findings[cause.name] = cause if other is None else dataclasses.replace(other, leg="engine")
    return list(findings.values())


def _answer(
    context: Context, tested: legs.LegsUnderTest, native: legs.Scored, judge: legs.Scored, decided: dict[str, Decided],
    found: tuple[Leg, ...], findings: Sequence[LogprobFinding],
) -> Answer:  # fmt: skip
    outcome, why = verdict.decide(found, findings)
    pairs = _pairs(tested, native, decided)
    first = pairs[legs.DECODE]
    moved = max(float(np.abs(pair.difference).max()) for pair in pairs.values())
    flips = reporting.flips(tested.prefill_top1, judge.top1, judge.margin, moved) if tested.prefill_top1 else None
    report = LogprobReport(
        model=context.plan.model.repo_id,
        weights=context.plan.checkpoint.in_reports,
        sampling=context.sampling, verdict=outcome, why=why, odd_leg=verdict.odd_leg(found), legs=found,
        pairs=tuple(
            reporting.pair_report(pair, rollout=name, train=legs.TRAINER, meaning=decided[name].meaning.words)
            for name, pair in pairs.items()
        ),
        findings=tuple(findings), presets={name: reporting.preset(name, first) for name in context.presets}, flips=flips,
        divergence=_divergence(context, tested, judge, moved),
        worst=reporting.worst_rows(first, tested.completions, judge.by_meaning[decided[legs.DECODE].meaning]),
        notes=semantics.notes(
            context.special, tested.completions, context.defaults, decided, _program(context)["package"]
        ),
        not_tested=semantics.not_tested(None if context.engine is None else context.engine.description(), decided, tested.facts),
        exit_code=EXITS.get(outcome, EXIT_NOT_JUDGED),
    )  # fmt: skip
    worst = np.argsort(-np.sqrt(first.means(np.square(first.difference))), kind="stable")[:WORST_SEQUENCES]
    return Answer(
        report=report, tokens=reporting.token_table(first, tested.completions),
        completions=tested.completions,
        worst=tuple(tested.completions[number] for number in worst.tolist()),
    )  # fmt: skip


def _divergence(context: Context, tested: legs.LegsUnderTest, judge: legs.Scored, moved: float) -> Divergence | None:
    """Return where greedy completions differ from the judge's likeliest tokens; None if they were not decoded greedily.

    It is also None for a rollout file. Tokens drawn at a temperature above 0 are not meant to be the likeliest.
    """
    if context.sampling.temperature > 0.0 or context.rollouts is not None:
        return None
    return reporting.divergence(tested.completions, judge.top1, judge.margin, moved)


def _pairs(tested: legs.LegsUnderTest, native: legs.Scored, decided: dict[str, Decided]) -> dict[str, Paired]:
    """Pair each engine leg with a trainer's values of the same quantity.

    The trainer's values of the rollout file are used if they are that quantity, else those of the trainer's side here.
    """
    pairs = {}
    given = tested.values.get(legs.TRAINER)
    for name in (legs.DECODE, legs.PREFILL):
        if name in tested.values:
            meaning = decided[name].meaning
            same = given is not None and decided[legs.TRAINER].meaning == meaning
            train = given if same and given is not None else native.by_meaning[meaning]
            pairs[name] = legs.pair(tested.completions, tested.values[name], train, f"{name} and trainer")
    return pairs
