"""Sites that no module of the candidate shows: they may explain an error, but they never decide the verdict.

Rotated queries and keys, scores and pattern are often local variables of a program's code. A tap takes them from the
arguments of the calls that use them, on the assumption that attention is written as in the reference
(`SiteTap.assumes`). A port that multiplies queries by the scale, masks with another number, or computes the softmax in
chunks computes the same function but shows other tensors there.

So if such a tensor departs, the sites that modules of the candidate show are examined. If one of the same block departs
on the same probe, the tensor is kept, because it may be the explanation. If none does, the output of the block is
right, and the tensor is set aside as not comparable. Rotated queries and keys whose difference cancels in every score
(see `cancelling`) are then set aside as well, even if a module shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from parity_audit.core.limits import ratio_of, share_of_limit
from parity_audit.core.report import SiteDelta
from parity_audit.core.sites import ROTATED, local_name
from parity_audit.core.types import NotVisible

AT_THE_FLOOR = "everything that modules of this port show of the block is within the noise floor"


@dataclass(frozen=True, kw_only=True)
class Aside:
    """A delta that is not compared, and in words how its tensor differs; `cause` is empty if that is not known."""

    delta: SiteDelta
    cause: str


def set_aside(
    deltas: Sequence[SiteDelta], assumed: Collection[tuple[str, str]], cause: Callable[[str, int], str]
) -> tuple[list[SiteDelta], list[Aside]]:
    """Split the deltas into those that are compared and those that are not comparable.

    Args:
        deltas: the deltas of one candidate.
        assumed: the places (probe, site) that no module shows.
        cause: returns in words how rotated queries and keys of (probe, layer) differ, if the difference cancels in
            every score, else "". If no other site that a module shows in that block departs, they are set aside even in
            a hook of the port.
    """
    departing = [delta for delta in deltas if share_of_limit(delta) > 1.0]
    shown = {
        (delta.probe, delta.layer)
        for delta in departing
        if (delta.probe, delta.site) not in assumed and local_name(delta.site) not in ROTATED
    }
    doubtful = {(delta.probe, delta.layer) for delta in departing if local_name(delta.site) in ROTATED} - shown
    causes = {(probe, layer): cause(probe, layer) for probe, layer in doubtful if layer is not None}
    shown |= {
        (delta.probe, delta.layer)
        for delta in departing
        if (delta.probe, delta.site) not in assumed and not causes.get((delta.probe, delta.layer or 0))
    }
    aside = []
    for delta in departing:
        known = causes.get((delta.probe, delta.layer or 0), "") if local_name(delta.site) in ROTATED else ""
        if known or ((delta.probe, delta.site) in assumed and (delta.probe, delta.layer) not in shown):
            aside.append(Aside(delta=delta, cause=known))
    dropped = {(item.delta.probe, item.delta.site) for item in aside}
    return [delta for delta in deltas if (delta.probe, delta.site) not in dropped], aside


def not_comparable(aside: Sequence[Aside], assumed: Mapping[tuple[str, str], str]) -> list[NotVisible]:
    """One entry per site that is not comparable, taken from the probe where it is furthest from the floor."""
    worst: dict[str, Aside] = {}
    for item in aside:
        known = worst.get(item.delta.site)
        if known is None or ratio_of(item.delta) > ratio_of(known.delta):
            worst[item.delta.site] = item
    return [NotVisible(site=site, why=_why(item, assumed)) for site, item in worst.items()]


def _why(item: Aside, assumed: Mapping[tuple[str, str], str]) -> str:
    found = item.cause or f"it is {ratio_of(item.delta):.3g}x the noise floor away"
    assumption = assumed.get((item.delta.probe, item.delta.site))
    taken = f"; it was read as if {assumption}" if assumption else ""
    return f"not comparable: {found}, and {AT_THE_FLOOR}{taken}"
