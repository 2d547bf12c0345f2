"""How long the runs of an audit will still take, told by its first run: every side runs the same probes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parity_audit.core.progress import CAPTURE, REUSE, RUNS


@dataclass(kw_only=True)
class Forecast:
    """Listens to the same news as a progress bar.

    A run is a series of `CAPTURE` news, one at the beginning of each probe. The first series of an audit says what each
    probe takes. A later series over as many probes is taken to go on at the pace, against the first, of its probes so far,
    and those that follow it at the pace of the first. What stands between runs (comparisons, diagnoses, repairs) is not
    counted.
    """

    clock: Callable[[], float] = time.monotonic
    announced: int = 0
    finished: int = 0
    usual: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    probes: int = 0

    def seconds_left(self, stage: str, done: int | None, total: int | None) -> float | None:
        """Seconds from this news on to the end of the last run; None outside runs and during the first."""
        now = self.clock()
        self._end(now)
        if stage == RUNS:
            self.announced = total or 0
        if stage == REUSE:
            self.finished += 1
        if stage != CAPTURE or done is None or not total or (self.usual and total != len(self.usual)):
            return None
        if done == 0:
            self.begun, self.probes = [], total
        if done != len(self.begun):
            return None
        self.begun.append(now)
        return self._left(now, done) if self.usual else None

    def _end(self, now: float) -> None:
        """Close a run whose last probe had begun before this news."""
        if not self.begun or len(self.begun) < self.probes:
            return
        if not self.usual:
            self.usual = [later - earlier for earlier, later in itertools.pairwise([*self.begun, now])]
        self.finished += 1
        self.begun = []

    def _left(self, now: float, done: int) -> float:
        past = sum(self.usual[:done])
        pace = (now - self.begun[0]) / past if past > 0 else 1.0
        following = max(0, self.announced - self.finished - 1)
        return pace * sum(self.usual[done:]) + following * sum(self.usual)
