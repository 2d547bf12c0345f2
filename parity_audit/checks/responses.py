"""What moving one constant of the judge does to every site of one short probe.

In float64 the change is free of rounding: RMSE(moved judge, judge). Large models are moved in their own float32, which
costs a fraction: a move of a thousandth stands so far above the floor that the rounding of two runs can be subtracted.
A site where it does not is left out.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.deltas import rmse_to_forced
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import limit_of
from parity_audit.core.types import Edit, KnobValue, Probe, SiteTap
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.thresholds import CLEARLY_MORE
from parity_audit.specs.schema import ResolvedKnob
from parity_audit.specs.settings import edits

FIRST_AMOUNTS = (1e-3, 0.04)
"""Relative; the second where the live value is stored too coarsely to hold the first."""
LARGEST_AMOUNT = 0.5
"""Relative: where no smaller change of a constant shows, it has no detection limit."""
FLOAT64_ROUNDING = 1e-13
"""Relative; a smaller change is the rounding of float64."""
MORE_RUNS = 2
"""Short runs that a limit is corrected by: a response that is nearly linear needs one, and few layers are the least sensitive."""
COUNTS = ("attention.window", "rope.partial", "moe.top_k", "pos_embed.offset")
DICT_NUMBER = "factor"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One constant that can be moved: `name` for the report, `value` its number, `given(number)` the knob's new value.

    Of a constant with a value per layer the number is that of the first one; all are moved by the same amount. `layers` are
    those that have it; None for all, and for constants outside the blocks.
    """

    name: str
    knob: str
    value: float
    whole: KnobValue
    layers: tuple[int, ...] | None = None

    @property
    def size(self) -> float:
        """What a relative amount is relative to: 1 for a constant that is 0."""
        return abs(self.value) or 1.0

    def given(self, number: float) -> KnobValue:
        """The knob's value with this number in its place."""
        if isinstance(self.whole, list):
            return [one + number - self.value for one in self.whole]
        return {**self.whole, DICT_NUMBER: number} if isinstance(self.whole, dict) else number

    def amount(self, wanted: float) -> float:
        """The amount to move by: of a count a whole number, 1 at least."""
        return max(1.0, round(wanted)) if self.knob in COUNTS else wanted


@dataclass(frozen=True, kw_only=True)
class Response:
    """What moving a constant by `amount` (in its own unit) does: RMSE of the judge per site that moves."""

    moved: Moved
    amount: float
    by_site: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every measurement shares. `still` is the run without a move, in the same precision."""

    session: Session
    still: Capture
    precision: str
    probe: Probe
    floors: Mapping[str, float]
    out: Path

    @property
    def native(self) -> bool:
        """Whether the judge is moved in its own float32."""
        return self.precision != FLOAT64


def movable(knobs: Mapping[str, ResolvedKnob]) -> Iterator[Moved]:
    """The numbers among an architecture's constants; of a scaling its factor."""
    for knob, known in knobs.items():
        value: Any = known.value
        if known.kind == "map":
            continue
        if is_number(value):
            yield Moved(name=knob, knob=knob, value=float(value), whole=value, layers=known.layers)
        elif known.by_layer and is_number(value[0]):
            yield Moved(name=knob, knob=knob, value=float(value[0]), whole=value)
        elif isinstance(value, dict) and is_number(value.get(DICT_NUMBER)):
            number = float(value[DICT_NUMBER])
            yield Moved(name=f"{knob}.{DICT_NUMBER}", knob=knob, value=number, whole=value, layers=known.layers)


def smallest(response: Response, floors: Mapping[str, float]) -> tuple[float, str]:
    """The smallest error that would be seen at one of these sites, and where it would be seen first."""
    reached = [
        (response.amount * limit_of(site) * floors[site] / change, site)
        for site, change in response.by_site.items()
        if site in floors
    ]
    return min(reached, default=(math.inf, ""))


def moved_by(bench: Bench, moved: Moved, amount: float) -> Response | None:
    """One run of the judge with a constant moved; None where it has no live setting for it."""
    amount = moved.amount(amount)
    if not set_to(bench, moved, amount):
        return None
    capture = taken(bench, "moved")
    found = changes(capture, bench)
    shutil.rmtree(capture.folder, ignore_errors=True)
    return Response(moved=moved, amount=amount, by_site=found)


def set_to(bench: Bench, moved: Moved, amount: float) -> bool:
    """Move the constant in the live judge. Live edits only: a fresh load per constant would cost more than the audit."""
    session, number = bench.session, moved.value + amount
    value = moved.given(int(number) if moved.knob in COUNTS else number)
    plan, version = session.plan, session.description().release
    found = edits(plan.spec, plan.backend_key, moved.knob, value, plan.config, version, {})
    live: tuple[Edit, ...] = tuple(edit for edit in found or () if edit.op != "load")
    if live:
        session.apply(live)
    return bool(live)


def taken(
    bench: Bench,
    name: str,
    *,
    only: tuple[str, ...] = ("",),
    forced_by: Capture | None = None,
    at: Collection[str] = (),
) -> Capture:
    """The judge as it is now on the probe, at the sites that are looked at and end in one of `only`.

    It goes on with the tensors of `forced_by` at the sites `at`.
    """

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return tap.site in bench.floors and tap.site.endswith(only)

    return take_capture(
        bench.session, [bench.probe], bench.out / name, precision=bench.precision, choose=choose, forced_by=forced_by,
        force=lambda probe, site: site in at,
    )  # fmt: skip


@one_thread()
def changes(moved: Capture, bench: Bench) -> dict[str, float]:
    """RMSE per site that moved; in native precision freed of the rounding of both runs."""
    name = bench.probe.name
    errors = {site: rmse_to_forced(moved, bench.still, bench.probe, site) for site in moved.sites(name)}
    if bench.precision == FLOAT64:
        return {site: rmse for site, (rmse, rms) in errors.items() if rmse > FLOAT64_ROUNDING * rms}
    clear = {
        site: (rmse, bench.floors[site])
        for site, (rmse, _) in errors.items()
        if rmse > CLEARLY_MORE * bench.floors[site]
    }
    return {site: math.sqrt(rmse**2 - 2 * floor**2) for site, (rmse, floor) in clear.items()}
