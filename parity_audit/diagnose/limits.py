"""Detection limits: the smallest error of each constant that this run could have seen, measured and not guessed.

The judge runs one short probe again with one constant moved a little. In float64 the change is free of rounding, so

    response(site) = RMSE(moved judge, judge)

is what that error does to a site, and the error would be seen where its response reaches the limit of that site:

    detection limit = amount * min over sites of  limit(site) * floor(site) / response(site)

with floor(site) = RMSE(reference, judge), in the dtype of the run. The first amount gives the slope. The next run is made
at the limit that this slope predicts, so the number stands where it is used even where the response bends; amounts far
below the first are not tried, because tables that are stored in float32 could not hold them.

Large models are moved in their own float32, which costs a fraction: a move of a thousandth stands so far above the floor
that the rounding of two runs can be subtracted. Where it does not, no number is given.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.deltas import Comparison, rmse_to_forced
from parity_audit.compare.floor import guard
from parity_audit.compare.threads import one_thread
from parity_audit.core.errors import BackendFailed, NotJudged
from parity_audit.core.limits import OUTER, limit_of
from parity_audit.core.report import DetectionLimit
from parity_audit.core.types import Edit, KnobValue, NotTested, Probe, SiteTap
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.diagnose.agreement import is_number
from parity_audit.specs.schema import ResolvedKnob
from parity_audit.specs.view import edits, knob_values

FIRST_AMOUNTS = (1e-3, 0.04)
"""Relative; the second where the live value is stored too coarsely to hold the first."""
LARGEST_AMOUNT = 0.5
LINEAR = 0.1
CORRECTIONS = 2
SILENT = 1e-13
"""Relative; a smaller change is the rounding of float64."""
CLEAR = 8.0
"""Floors that a native run has to move by, to be told from rounding."""
COUNTS = ("attention.window", "rope.partial", "moe.top_k", "pos_embed.offset")
DICT_NUMBER = "factor"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One constant that can be moved: `name` for the report, `value` its number, `given(number)` the knob's new value."""

    name: str
    knob: str
    value: float
    whole: KnobValue

    @property
    def size(self) -> float:
        """What a relative amount is relative to: 1 for a constant that is 0."""
        return abs(self.value) or 1.0

    def given(self, number: float) -> KnobValue:
        """The knob's value with this number in its place."""
        return {**self.whole, DICT_NUMBER: number} if isinstance(self.whole, dict) else number

    def amount(self, wanted: float) -> float:
        """The amount to move by: of a count a whole number, 1 at least."""
        return max(1.0, round(wanted)) if self.knob in COUNTS else wanted


@dataclass(frozen=True, kw_only=True)
class Response:
    """What moving a constant by `amount` (in its own unit) does: RMSE of the judge per site."""

    moved: Moved
    amount: float
    by_site: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Responses of every constant on one probe, the floor of each site there, and what could not be measured."""

    probe: str
    floors: Mapping[str, float] = field(default_factory=dict)
    responses: tuple[Response, ...] = ()
    gaps: tuple[NotTested, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What every measurement shares. `still` is the run without a move, in the same precision."""

    session: Session
    still: Capture
    precision: str
    probe: Probe
    floors: Mapping[str, float]
    out: Path


def measure(
    session: Session, judge: Capture, reference: Capture, *, dtype: str, small: bool, own: bool, out: Path
) -> Sensitivity:
    """Move every constant that can be moved live, one at a time, and put it back.

    Args:
        session: the judge's; its edits are undone in the end.
        small: the model is: look at every site and not only at the residual stream, always in float64.
        own: `reference` was run by `session`.
    """
    started = time.perf_counter()
    probe = chosen_probe(judge.probes)
    floors = _floors(reference, judge, probe, dtype, small)
    native = not small and own and dtype == "float32"
    bench = _Bench(
        session=session, still=reference if native else judge, precision=NATIVE if native else FLOAT64, probe=probe,
        floors=floors, out=out,
    )  # fmt: skip
    constants = movable(knob_values(session.plan.spec, session.plan.config))
    try:
        found = [_response(bench, moved) for moved in constants]
        session.apply(())
    except NotJudged as error:  # what is known of small errors is not worth an audit
        session.release()
        session.edits = ()
        return Sensitivity(probe=probe.name, gaps=(NotTested(what="detection limits", why=error.message),))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Sensitivity(
        probe=probe.name, floors=floors, responses=tuple(item for item in found if isinstance(item, Response)),
        gaps=tuple(item for item in found if isinstance(item, NotTested)), seconds=time.perf_counter() - started,
    )  # fmt: skip


def chosen_probe(probes: Sequence[Probe]) -> Probe:
    """The longest of the cheap ones: every site, one row; of long probes the shortest."""

    def cost(probe: Probe) -> tuple[bool, int, int]:
        cheap, length = probe.sites == "all", probe.shape[1]
        return not cheap, len(probe.token_ids), -length if cheap else length

    return min(probes, key=cost)


def movable(knobs: Mapping[str, ResolvedKnob]) -> Iterator[Moved]:
    """The numbers among an architecture's constants; of a scaling its factor."""
    for knob, known in knobs.items():
        value: Any = known.value
        if known.kind == "map":
            continue
        if is_number(value):
            yield Moved(name=knob, knob=knob, value=float(value), whole=value)
        elif isinstance(value, dict) and is_number(value.get(DICT_NUMBER)):
            yield Moved(name=f"{knob}.{DICT_NUMBER}", knob=knob, value=float(value[DICT_NUMBER]), whole=value)


@one_thread()
def _floors(reference: Capture, judge: Capture, probe: Probe, dtype: str, everything: bool) -> dict[str, float]:
    """The noise floor of every site that is looked at, in the unit of the site."""
    sites = [site for site in reference.sites(probe.name) & judge.sites(probe.name) if everything or _outer(site)]
    errors = {site: rmse_to_forced(reference, judge, probe, site) for site in sites}
    return {site: max(rmse, guard(rms, dtype)) for site, (rmse, rms) in errors.items() if rmse == rmse}


def _outer(site: str) -> bool:
    return site.endswith(OUTER)


def _response(bench: _Bench, moved: Moved) -> Response | NotTested:
    """The response at the detection limit, or why there is none."""
    try:
        for first in FIRST_AMOUNTS:
            found = _moved_by(bench, moved, first * moved.size)
            if found is None:
                return _gap(moved, "the judge has no live setting for it")
            if found.by_site:
                return _at_the_limit(bench, found)
    except BackendFailed as error:
        return _gap(moved, f"the judge could not be run with it moved: {error.message.splitlines()[0]}")
    reach = "nothing" if bench.precision == FLOAT64 else f"nothing by {CLEAR:g} floors"
    return _gap(
        moved, f"not excited by probe {bench.probe.name} ({bench.probe.shape[1]} tokens): moving it moves {reach}"
    )


def _at_the_limit(bench: _Bench, first: Response) -> Response:
    """Run again nearer to the limit that the last run predicts, until the prediction stands or is no small error."""
    response = first
    for _ in range(CORRECTIONS):
        predicted = smallest(response, bench.floors)[0]
        target = min(max(predicted, first.amount / 2), LARGEST_AMOUNT * first.moved.size)
        known = bench.precision == NATIVE and predicted < response.amount  # rounding would only blur a smaller move
        if known or abs(target / response.amount - 1) <= LINEAR:
            break
        nearer = _moved_by(bench, first.moved, target)
        if nearer is None or not nearer.by_site:
            break
        response = nearer
    return response


def _moved_by(bench: _Bench, moved: Moved, amount: float) -> Response | None:
    """One run of the judge with a constant moved; sites that do not move are left out."""
    amount = moved.amount(amount)
    number = moved.value + amount
    live = _edits(bench.session, moved, int(number) if moved.knob in COUNTS else number)
    if not live:
        return None
    bench.session.apply(live)

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return tap.site in bench.floors

    capture = take_capture(bench.session, [bench.probe], bench.out / "moved", precision=bench.precision, choose=choose)
    by_site = _changes(capture, bench)
    shutil.rmtree(capture.folder, ignore_errors=True)
    return Response(moved=moved, amount=amount, by_site=by_site)


@one_thread()
def _changes(moved: Capture, bench: _Bench) -> dict[str, float]:
    """RMSE per site that moved; in native precision freed of the rounding of both runs."""
    name = bench.probe.name
    errors = {site: rmse_to_forced(moved, bench.still, bench.probe, site) for site in moved.sites(name)}
    if bench.precision == FLOAT64:
        return {site: rmse for site, (rmse, rms) in errors.items() if rmse > SILENT * rms}
    clear = {
        site: (rmse, bench.floors[site]) for site, (rmse, _) in errors.items() if rmse > CLEAR * bench.floors[site]
    }
    return {site: math.sqrt(rmse**2 - 2 * floor**2) for site, (rmse, floor) in clear.items()}


def _edits(session: Session, moved: Moved, number: float) -> tuple[Edit, ...]:
    """Live edits only: a fresh load per constant would cost more than the audit."""
    plan, version = session.plan, session.description().version
    found = edits(plan.spec, plan.backend_key, moved.knob, moved.given(number), plan.config, version, {})
    return tuple(edit for edit in found or () if edit.op != "load")


def smallest(response: Response, floors: Mapping[str, float]) -> tuple[float, str]:
    """The smallest error that would be seen at one of these sites, and where it would be seen first."""
    reached = [
        (response.amount * limit_of(site) * floors[site] / change, site)
        for site, change in response.by_site.items()
        if site in floors
    ]
    return min(reached, default=(float("inf"), ""))


def detection_limits(found: Sensitivity, comparison: Comparison) -> tuple[tuple[DetectionLimit, ...], list[NotTested]]:
    """The limits of one candidate: of all sites, those that it shows."""
    shown = {delta.site for delta in comparison.deciding_by_probe if delta.probe == found.probe}
    floors = {site: floor for site, floor in found.floors.items() if site in shown}
    limits: list[DetectionLimit] = []
    gaps = list(found.gaps)
    for response in found.responses:
        limit, site = smallest(response, floors)
        if site:
            moved = response.moved
            limit = math.ceil(limit) if moved.knob in COUNTS else limit
            limits.append(DetectionLimit(
                knob=moved.name, value=moved.value, limit=limit, relative=limit / moved.size, site=site,
                probe=found.probe,
            ))  # fmt: skip
        else:
            gaps.append(_gap(response.moved, "the candidate shows no site that it moves"))
    return tuple(limits), gaps


def _gap(moved: Moved, why: str) -> NotTested:
    return NotTested(what=f"detection limit of {moved.name}", why=why)
