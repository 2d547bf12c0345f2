"""Measure how every site of one short probe changes when one constant of the judge is moved.

In float64 the change is free of rounding: RMSE(moved judge, judge). Large models are moved in their own float32, which takes
a fraction of the time: a move of a thousandth changes most sites so far beyond the floor that the rounding of the two runs can
be subtracted. A site that does not change that clearly is left out.
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
"""Relative amounts; the second is used if the first shows nothing, as when the live value is stored too coarsely for it."""
LARGEST_AMOUNT = 0.5
"""Relative: the largest amount by which a constant is moved; beyond it an error is no small one."""
FLOAT64_ROUNDING = 1e-13
"""Relative RMS; a smaller change of a site counts as rounding of float64."""
MORE_RUNS = 2
"""The most runs by which a limit is corrected, or layers followed: a nearly linear response needs one, and few layers can be the
least sensitive."""
COUNTS = ("attention.window", "rope.partial", "moe.top_k", "pos_embed.offset")
DICT_NUMBER = "factor"


@dataclass(frozen=True, kw_only=True)
class PerturbableConstant:
    """One constant that can be moved: its `name` in the report, its number `value`, and the knob's `whole` value.

    If a constant has a value per layer, `value` is the first layer's, and all layers are moved by the same amount. `layers` are
    the layers that have the constant; None for all layers and for constants outside the blocks.
    """

    name: str
    knob: str
    value: float
    whole: KnobValue
    layers: tuple[int, ...] | None = None

    @property
    def size(self) -> float:
        """The size to which relative amounts refer: the constant's absolute value, or 1 for a constant that is 0."""
        return abs(self.value) or 1.0

    def given(self, number: float) -> KnobValue:
        """Return the knob's whole value with the constant moved to `number`."""
        if isinstance(self.whole, list):
            return [one + number - self.value for one in self.whole]
        return {**self.whole, DICT_NUMBER: number} if isinstance(self.whole, dict) else number

    def amount(self, wanted: float) -> float:
        """Return the amount to move by: for counts `wanted` rounded to a whole number of at least 1, else `wanted`."""
        return max(1.0, round(wanted)) if self.knob in COUNTS else wanted


@dataclass(frozen=True, kw_only=True)
class Response:
    """The effect of moving a constant by `amount` (in its own unit): the judge's RMSE at each site that changes."""

    moved: PerturbableConstant
    amount: float
    by_site: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MeasurementSetup:
    """The inputs that all measurements share. `still` is the run with no constant moved, in the same precision."""

    session: Session
    still: Capture
    precision: str
    probe: Probe
    floors: Mapping[str, float]
    out: Path

    @property
    def native(self) -> bool:
        """Whether the moved judge runs in its native float32 instead of float64."""
        return self.precision != FLOAT64


def perturbable_constants(knobs: Mapping[str, ResolvedKnob]) -> Iterator[PerturbableConstant]:
    """Yield every constant of an architecture that is a number; for a scaling given as a dictionary, its factor."""
    for knob, known in knobs.items():
        value: Any = known.value
        if known.kind == "map":
            continue
        if is_number(value):
            yield PerturbableConstant(name=knob, knob=knob, value=float(value), whole=value, layers=known.layers)
        elif known.by_layer and is_number(value[0]):
            yield PerturbableConstant(name=knob, knob=knob, value=float(value[0]), whole=value)
        elif isinstance(value, dict) and is_number(value.get(DICT_NUMBER)):
            number = float(value[DICT_NUMBER])
            yield PerturbableConstant(
                name=f"{knob}.{DICT_NUMBER}", knob=knob, value=number, whole=value, layers=known.layers
            )


def smallest(response: Response, floors: Mapping[str, float]) -> tuple[float, str]:
    """Return the smallest error that would be detected at one of the sites in `floors`, and that site.

    The result is (inf, "") if none of them changes.
    """
    reached = [
        (response.amount * limit_of(site) * floors[site] / change, site)
        for site, change in response.by_site.items()
        if site in floors
    ]
    return min(reached, default=(math.inf, ""))


def moved_by(bench: MeasurementSetup, moved: PerturbableConstant, amount: float) -> Response | None:
    """Run the judge with a constant moved; None if the judge has no live setting for it."""
    amount = moved.amount(amount)
    if not set_to(bench, moved, amount):
        return None
    capture = taken(bench, "moved")
    found = changes(capture, bench)
    shutil.rmtree(capture.folder, ignore_errors=True)
    return Response(moved=moved, amount=amount, by_site=found)


def set_to(bench: MeasurementSetup, moved: PerturbableConstant, amount: float) -> bool:
    """Move the constant in the loaded judge; False if it has no live setting.

    Only live edits are made, because loading the model again for each constant would take longer than the audit.
    """
    session, number = bench.session, moved.value + amount
    value = moved.given(int(number) if moved.knob in COUNTS else number)
    plan, version = session.plan, session.description().release
    found = edits(plan.spec, plan.backend_key, moved.knob, value, plan.config, version, {})
    live: tuple[Edit, ...] = tuple(edit for edit in found or () if edit.op != "load")
    if live:
        session.apply(live)
    return bool(live)


def taken(
    bench: MeasurementSetup,
    name: str,
    *,
    only: tuple[str, ...] = ("",),
    forced_by: Capture | None = None,
    at: Collection[str] = (),
) -> Capture:
    """Capture the judge as it is now, at those sites in `bench.floors` whose names end in one of `only`.

    At the sites `at` the run continues with the tensors of `forced_by`.
    """

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return tap.site in bench.floors and tap.site.endswith(only)

    return take_capture(
        bench.session, [bench.probe], bench.out / name, precision=bench.precision, choose=choose, forced_by=forced_by,
        force=lambda probe, site: site in at,
    )  # fmt: skip


@one_thread()
def changes(moved: Capture, bench: MeasurementSetup) -> dict[str, float]:
    """Return the RMSE of each site that changed; in native precision the rounding of both runs is subtracted."""
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
