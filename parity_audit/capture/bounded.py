"""Choose, before anything is run, which probes run and what is kept of each, so that the audit's files fit into `--disk`.

The probes are reduced in this order until the files fit into `--disk`, or into `ROOM` if no `--disk` is given:

1. of long probes only informative positions are kept: both ends, the tokens around every window and length that the
   architecture knows, and evenly spread ones;
2. of all probes but the first only the residual stream and the outputs are kept;
3. only if `--disk` is given, whole probes are left out, the largest first, but never the first one or the user's own texts.

If a candidate departs on a reduced probe and nothing else explains it, the residual stream and attention's inputs and outputs
are captured there at every position (see `diagnose.diagnosis`).
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
"""Positions are selected only in probes of at least this many tokens: shorter ones cost little for a model that needs a bound."""
ENDS, EDGE, SPREAD = 16, 8, 32
"""Positions kept at each end, on each side of a window's edge, and evenly spread: errors of a window begin at its edge and
remain, errors of RoPE grow with the distance, so a hundred out of thousands of positions show both."""
ROOM = 3 << 29
"""Bytes that one candidate's audit may write if the user gives no bound. All sites and positions of a model with up to a few
million parameters take less; those of a model with 2.6 billion take up to 97 GB. A port at parity writes about half of the
bound, below 1 GB, because no causes are searched."""
WHOLE = sys.maxsize
"""The bound for callers that need every position and site, however many bytes that takes."""
REPLAYS = 4
"""Replays of the judge per probe with every site, if a candidate departs: on the reference's and on the candidate's inputs,
each once with all tensors and once without the tensors that rest on an assumption."""


@dataclass(frozen=True, kw_only=True)
class ProbeSelection:
    """The probes as they will be run, what is left out of them, and the upper bound of the bytes that they take."""

    probes: tuple[Probe, ...]
    left_out: tuple[NotTested, ...]
    needed: int


@dataclass(frozen=True, kw_only=True)
class Writes:
    """The most bytes that an audit of one candidate writes: captures of reference, judge and candidate, replays, patched runs.

    `definition`: whether there is one more capture, the definition's own run, because the reference cannot run in float64.
    """

    taps: Sequence[SiteTap]
    sizes: Mapping[str, int]
    repair: bool
    definition: bool = False

    def of(self, probe: Probe) -> int:
        """Return the bytes of all captures of one probe.

        A candidate's returned logits are counted in addition to those of its hook: they share one file only if bit-identical.
        """
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
        """Return the bytes of all captures of these probes."""
        return sum(map(self.of, probes))


def reduce_to_fit(
    probes: Sequence[Probe], own: Sequence[Probe], writes: Writes, config: Mapping[str, Any], bound: int | None
) -> ProbeSelection:
    """Reduce `probes` until the audit's files fit into `bound` bytes; `own` are the user's texts, which are never reduced.

    If `bound` is None, every probe runs, and what is kept of the probes is reduced only if all of it exceeds `ROOM`.

    Raises:
        UsageError: not even the first probe fits into the user's bound.
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
    return ProbeSelection(probes=tuple(kept), left_out=tuple(gaps.values()), needed=need())


def kept_positions(length: int, edges: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of a text of this length that are kept: the ends, around window edges, and evenly spread ones."""
    near = [at + step for at in edges for step in range(-EDGE, EDGE)]
    spread = [number * (length - 1) // (SPREAD - 1) for number in range(SPREAD)]
    places = {*range(ENDS), *range(length - ENDS, length), *near, *spread}
    return tuple(sorted(place for place in places if 0 <= place < length))


def _chosen_positions(config: Mapping[str, Any]) -> Callable[[Probe], tuple[Probe, str]]:
    def change(probe: Probe) -> tuple[Probe, str]:
        length = probe.shape[1]
        if probe.sites == "all" or length < LONG:
            return probe, ""
        places = kept_positions(length, thresholds(config))
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
