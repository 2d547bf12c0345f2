"""What is kept of each probe, and which probes fit into `--disk`: the most that can be had, chosen before anything is run.

In this order, until what an audit writes fits, into `--disk` or where none is given into `ROOM`:

1. of long probes only the positions that tell: both ends, the tokens around every window and length that the architecture
   knows, and a spread between them;
2. of all probes but the first only the residual stream and the outputs;
3. under `--disk` alone, whole probes are left out, the dearest first, never the first one or a text of the user's own.

Where a candidate departs on a probe that was cut down and nothing else explains it, the stream and the attention's inputs and
outputs are captured there in every position (see `diagnose.diagnosis`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.filesize import decimal

from parity_audit.capture.probes import thresholds
from parity_audit.capture.scratch import DISK_BOUND
from parity_audit.capture.sizes import FLOAT64_BYTES, STORED_BYTES, numbers_of
from parity_audit.capture.take import wanted, whole_in_steps
from parity_audit.core.errors import UsageError
from parity_audit.core.sites import LOGITS
from parity_audit.core.types import NotTested, Probe, SiteTap

LONG = 512
"""Tokens from which on positions are chosen: shorter probes are cheap beside a model that asks for a bound."""
ENDS, EDGE, SPREAD = 16, 8, 32
"""Positions kept at either end, on either side of a window's edge, and evenly between: errors of a window begin at its edge and
stay, errors of RoPE grow with the distance, so a hundred of thousands of positions show both."""
ROOM = 3 << 29
"""Bytes for everything that one candidate's audit may write where the user gives no bound: every site and position of a model up to
a few million parameters takes less, those of one of 2.6 billion up to 97 GB. A port at parity writes about half of it, as nobody
looks for causes: below 1 GB."""
WHOLE = sys.maxsize
"""A bound for those who need every position and site, whatever that takes."""
REPLAYS = 4
"""Runs of the judge on the inputs of the reference and of the candidate, of probes with every site, where a candidate departs:
each whole, and once more without the tensors that rest on an assumption."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The probes as they will be run, what is left out of them, and the most bytes that they take."""

    probes: tuple[Probe, ...]
    left_out: tuple[NotTested, ...]
    needed: int


@dataclass(frozen=True, kw_only=True)
class Writes:
    """What an audit of one candidate writes at most, by probe: reference, judge, candidate, and what looks for causes.

    `definition`: a reference that cannot run in float64 is measured against the definition's own run, one capture more.
    """

    taps: Sequence[SiteTap]
    sizes: Mapping[str, int]
    repair: bool
    definition: bool = False

    def of(self, probe: Probe) -> int:
        """Bytes of all captures of one probe. What a candidate returns is counted beside the logits that its hook shows: they
        are one file only where no bit differs."""
        chosen = [tap for tap in self.taps if wanted(tap, probe) and whole_in_steps(tap, probe)]
        returned = [tap for tap in chosen if tap.site == LOGITS]
        shown, again = (numbers_of(probe, part, self.sizes) for part in ([*chosen, *returned], chosen))
        taken = ((1 + self.definition) * STORED_BYTES + FLOAT64_BYTES) * again + STORED_BYTES * shown
        if probe.sites == "all":
            taken += REPLAYS * FLOAT64_BYTES * again
        if not self.repair:
            return taken
        return taken + STORED_BYTES * shown + (FLOAT64_BYTES * again if probe.sites == "all" else 0)

    def total(self, probes: Sequence[Probe]) -> int:
        """Bytes of all of them."""
        return sum(map(self.of, probes))


def fitted(
    probes: Sequence[Probe], own: Sequence[Probe], writes: Writes, config: Mapping[str, Any], bound: int | None
) -> Fitted:
    """What of `probes` is run and kept within `bound` bytes; `own` are the user's texts, of which nothing is left out.

    Where `bound` is None every probe is run, and what is kept of it is cut down only where all of it exceeds `ROOM`.

    Raises:
        UsageError: not even the first probe fits into a bound of the user's.
    """
    gaps: dict[str, NotTested] = {}
    kept = list(probes)
    room, by = (ROOM if bound is None else bound), _by(bound)

    def need() -> int:
        return writes.total([*kept, *own])

    for change, what in (
        (_chosen_positions(config), "positions of probe {name}"),
        (_narrow, "sites inside blocks on probe {name}"),
    ):
        for number, probe in enumerate(kept):
            if need() <= room:
                break
            less, why = change(probe) if number else (probe, "")
            if less is not probe:
                kept[number] = less
                gaps[what.format(name=probe.name)] = NotTested(what=what.format(name=probe.name), why=f"{by}: {why}")
    while bound is not None and need() > room and len(kept) > 1:
        dearest = max(kept[1:], key=writes.of)
        kept.remove(dearest)
        gaps = {what: gap for what, gap in gaps.items() if not what.endswith(f"probe {dearest.name}")}
        gaps[dearest.name] = NotTested(what=f"probe {dearest.name}", why=f"left out by {by}: {dearest.purpose}")
    if bound is not None and need() > room:
        raise UsageError(
            f"nothing fits into {by}: probe {kept[0].name} alone writes up to {decimal(need())}", code=DISK_BOUND,
            hint="`parity-audit plan MODEL` shows what each probe takes; --no-repair needs less",
        )  # fmt: skip
    return Fitted(probes=tuple(kept), left_out=tuple(gaps.values()), needed=need())


def told_positions(length: int, edges: Sequence[int]) -> tuple[int, ...]:
    """The positions of a text of this length that are kept: ends, the edges of windows, and a spread."""
    near = [at + step for at in edges for step in range(-EDGE, EDGE)]
    spread = [number * (length - 1) // (SPREAD - 1) for number in range(SPREAD)]
    places = {*range(ENDS), *range(length - ENDS, length), *near, *spread}
    return tuple(sorted(place for place in places if 0 <= place < length))


def _chosen_positions(config: Mapping[str, Any]) -> Callable[[Probe], tuple[Probe, str]]:
    def change(probe: Probe) -> tuple[Probe, str]:
        length = probe.shape[1]
        if probe.sites == "all" or length < LONG:
            return probe, ""
        places = told_positions(length, thresholds(config))
        return replace(
            probe, kept=places
        ), f"{len(places)} of {length} are kept: both ends, the edges of windows, a spread"

    return change


def _narrow(probe: Probe) -> tuple[Probe, str]:
    if probe.sites != "all":
        return probe, ""
    return replace(probe, sites="residual"), "the residual stream and the outputs are kept"


def _by(bound: int | None) -> str:
    if bound is None:
        return f"all would take more than {decimal(ROOM)}, which a larger --disk allows"
    return f"--disk {decimal(bound)}"
