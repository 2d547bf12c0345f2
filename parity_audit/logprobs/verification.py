"""Verify the settings that a finding proposes: run the engine with them, and measure its distance to the judge again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from parity_audit.capture.session import merged
from parity_audit.core.errors import ParityError
from parity_audit.core.logprob_report import LogprobFinding, Verified
from parity_audit.core.rollouts import Sampling, Variation
from parity_audit.core.types import Edit
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.logprobs import legs, verdict
from parity_audit.logprobs.context import Context
from parity_audit.logprobs.meaning import policy
from parity_audit.logprobs.tested import sampled

SAMPLING = {field.name for field in fields(Sampling)}


def start(context: Context, tested: legs.LegsUnderTest, native: legs.Scored, judge: legs.Scored) -> tuple[float, float]:
    """Return the decode leg's RMSE to the judge, and its ratio to the trainer's rounding, in the quantity that training needs."""
    wanted = policy(context.sampling)
    values, truth = tested.values[legs.DECODE], judge.by_meaning[wanted]
    return verdict.rmse(values, truth), verdict.ratio(values, native.by_meaning[wanted], truth, context.plan.dtype)


def verified(
    context: Context, findings: Sequence[LogprobFinding], before: tuple[float, float]
) -> tuple[LogprobFinding, ...]:
    """Return the findings; each finding of the engine that proposes settings gets the measured effect of these settings.

    The settings are applied one finding after another, and those of earlier findings stay in force.
    """
    engine = context.engine
    if engine is None:
        return tuple(findings)
    rmse, settings, sampling, found = before[0], dict[str, Any](), context.sampling, []
    for finding in findings:
        if not finding.settings or finding.leg == legs.TRAINER:
            found.append(finding)
            continue
        settings = merged(settings, {key: value for key, value in finding.settings.items() if key not in SAMPLING})
        sampling = replace(sampling, **{key: value for key, value in finding.settings.items() if key in SAMPLING})
        try:
            after, ratio = _measured(replace(context, sampling=sampling), settings)
            result = Verified(rmse_before=rmse, rmse_after=after, ratio=ratio)
            rmse = after
        except ParityError as error:
            result = Verified(rmse_before=rmse, error=error.message.splitlines()[0])
        found.append(replace(finding, verified=result))
    engine.discard()
    return tuple(found)


def _measured(context: Context, settings: dict[str, Any]) -> tuple[float, float]:
    """Sample again with these settings of the engine, score the samples on the trainer's side, and return as `start` does."""
    assert context.engine is not None
    context.trainer.release()
    words = ", ".join(f"{key}={value}" for key, value in settings.items())
    context.progress.update("verify", f"engine with {words or 'another sampling'}")
    context.engine.apply((Edit(op="load", value=settings),))
    tested = sampled(context)
    native = context.scored(tested.completions, NATIVE, context.base)
    return start(context, tested, native, context.scored(tested.completions, FLOAT64, Variation()))
