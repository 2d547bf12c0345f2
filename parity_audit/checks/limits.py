"""Detection limits: the smallest error of each constant that this run could have detected, found by measurement.

The judge runs one short probe again with one constant moved a little (see `responses`). An error is detected if the response
at some site exceeds the limit of that site:

    detection limit = amount * min over sites of  limit(site) * floor(site) / response(site)

with floor(site) = RMSE(reference, judge), in the dtype of the run, and limit(site) the one that the verdict uses. Each limit
is given twice: for an error in every layer, and for an error in the single layer where it shows least (see `single_layer`).
The first amount gives the slope, which holds for all smaller amounts. If the slope predicts a limit larger than that amount,
the next run uses the predicted amount, so that the limit is measured where it applies even if the response is not linear.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.checks.responses import (
    COUNTS,
    FIRST_AMOUNTS,
    LARGEST_AMOUNT,
    MORE_RUNS,
    MeasurementSetup,
    PerturbableConstant,
    Response,
    moved_by,
    perturbable_constants,
    smallest,
)
from parity_audit.checks.single_layer import ByLayer, by_layer
from parity_audit.compare.deltas import Comparison, rmse_to_forced
from parity_audit.compare.floor import guard
from parity_audit.compare.threads import one_thread
from parity_audit.core.errors import BackendFailed, NotJudged
from parity_audit.core.limits import OUTER
from parity_audit.core.report import DetectionLimit, LayerLimit
from parity_audit.core.types import NotTested, Probe
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.diagnose.fit.search import SAME_WITHIN
from parity_audit.diagnose.thresholds import CLEARLY_MORE
from parity_audit.specs.view import dims, knob_values


@dataclass(frozen=True, kw_only=True)
class Found:
    """The responses to moving one constant in every layer, and in one layer alone (by layer)."""

    everywhere: Response
    alone: ByLayer = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The responses to every constant on one probe, the noise floor of each site, and the constants not measured."""

    probe: str
    floors: Mapping[str, float] = field(default_factory=dict)
    responses: tuple[Found, ...] = ()
    gaps: tuple[NotTested, ...] = ()
    seconds: float = 0.0


def measure(
    session: Session, judge: Capture, reference: Capture, *, dtype: str, small: bool, own: bool, out: Path
) -> Sensitivity:
    """Measure the response to every constant that can be changed in the loaded model, one at a time, and restore it.

    Args:
        session: the judge's session; its edits are undone at the end.
        small: whether the model is small; then every site is measured, not only the residual stream, and always in float64.
        own: whether `reference` was run by `session`.
    """
    started = time.perf_counter()
    probe = chosen_probe(judge.probes)
    floors = _floors(reference, judge, probe, dtype, small)
    native = not small and own and dtype == "float32"
    bench = MeasurementSetup(
        session=session, still=reference if native else judge, precision=NATIVE if native else FLOAT64, probe=probe,
        floors=floors, out=out,
    )  # fmt: skip
    constants = perturbable_constants(knob_values(session.plan.spec, session.plan.config))
    try:
        n_layers = dims(session.plan.spec, session.plan.config)["n_layers"]
        found = [_found(bench, moved, n_layers) for moved in constants]
        session.restore()
    except NotJudged as error:  # a failure to measure detection limits must not end the audit
        session.discard()
        return Sensitivity(probe=probe.name, gaps=(NotTested(what="detection limits", why=error.message),))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Sensitivity(
        probe=probe.name, floors=floors, responses=tuple(item for item in found if isinstance(item, Found)),
        gaps=tuple(item for item in found if isinstance(item, NotTested)), seconds=time.perf_counter() - started,
    )  # fmt: skip


def chosen_probe(probes: Sequence[Probe]) -> Probe:
    """Return the probe that is cheap to run: one that captures every site, with the fewest rows, and of those the longest.

    If no probe captures every site, return the shortest of those with the fewest rows.
    """

    def cost(probe: Probe) -> tuple[bool, int, int]:
        cheap, length = probe.sites == "all", probe.shape[1]
        return not cheap, len(probe.token_ids), -length if cheap else length

    return min(probes, key=cost)


@one_thread()
def _floors(reference: Capture, judge: Capture, probe: Probe, dtype: str, everything: bool) -> dict[str, float]:
    """Return the noise floor of every site that is measured, in the site's own unit."""
    sites = [site for site in reference.sites(probe.name) & judge.sites(probe.name) if everything or _outer(site)]
    errors = {site: rmse_to_forced(reference, judge, probe, site) for site in sites}
    return {site: max(rmse, guard(rms, dtype)) for site, (rmse, rms) in errors.items() if rmse == rmse}


def _outer(site: str) -> bool:
    return site.endswith(OUTER)


def _found(bench: MeasurementSetup, moved: PerturbableConstant, n_layers: int) -> Found | NotTested:
    """Return the responses to one constant at its detection limits, or the reason why there are none."""
    try:
        for first in FIRST_AMOUNTS:
            found = moved_by(bench, moved, first * moved.size)
            if found is None:
                return _gap(moved, "the judge has no live setting for it")
            if found.by_site:
                return Found(everywhere=_at_the_limit(bench, found), alone=by_layer(bench, moved, n_layers))
    except BackendFailed as error:
        return _gap(moved, f"the judge could not be run with it moved: {error.message.splitlines()[0]}")
    reach = "nothing" if bench.precision == FLOAT64 else f"nothing by {CLEARLY_MORE:g} floors"
    return _gap(
        moved, f"not excited by probe {bench.probe.name} ({bench.probe.shape[1]} tokens): moving it moves {reach}"
    )


def _at_the_limit(bench: MeasurementSetup, first: Response) -> Response:
    """Rerun at the detection limit that the last run predicts, while that limit is larger than the last amount.

    At most `MORE_RUNS` runs are made, and none beyond `LARGEST_AMOUNT`, which is no small error any more.
    """
    response = first
    for _ in range(MORE_RUNS):
        predicted = smallest(response, bench.floors)[0]
        target = min(predicted, LARGEST_AMOUNT * first.moved.size)
        if target <= SAME_WITHIN * response.amount:
            break
        nearer = moved_by(bench, first.moved, target)
        if nearer is None or not nearer.by_site:
            break
        response = nearer
    return response


def detection_limits(found: Sensitivity, comparison: Comparison) -> tuple[tuple[DetectionLimit, ...], list[NotTested]]:
    """Return one candidate's detection limits, over the sites that it shows and that decide its verdict.

    The second value lists the constants without a limit.
    """
    shown = {delta.site for delta in comparison.deciding_by_probe if delta.probe == found.probe}
    floors = {site: floor for site, floor in found.floors.items() if site in shown}
    limits: list[DetectionLimit] = []
    gaps = list(found.gaps)
    for response in found.responses:
        moved = response.everywhere.moved
        limit, site = _limit(response.everywhere, floors)
        if limit is None:
            gaps.append(_gap(moved, "the candidate shows no site that it moves"))
            continue
        limits.append(DetectionLimit(
            knob=moved.name, value=moved.value, limit=limit, relative=limit / moved.size, site=site, probe=found.probe,
            one_layer=_one_layer(response.alone, floors),
        ))  # fmt: skip
    return tuple(limits), gaps


def _limit(response: Response, floors: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the detection limit and the site that reaches its limit first; None if no site moves."""
    limit, site = smallest(response, floors)
    if not site:
        return None, ""
    return math.ceil(limit) if response.moved.knob in COUNTS else limit, site


def _one_layer(alone: ByLayer, floors: Mapping[str, float]) -> LayerLimit | None:
    """Return the limit in the layer where an error shows least; None for a constant that no block has."""
    found = [(layer, response.moved, *_limit(response, floors)) for layer, response in alone.items()]
    if not found:
        return None
    layer, moved, limit, site = max(found, key=lambda item: math.inf if item[2] is None else item[2])
    return LayerLimit(layer=layer, limit=limit, relative=None if limit is None else limit / moved.size, site=site)


def _gap(moved: PerturbableConstant, why: str) -> NotTested:
    return NotTested(what=f"detection limit of {moved.name}", why=why)
