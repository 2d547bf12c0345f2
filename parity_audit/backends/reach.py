"""Run probes that are longer than a port's limit: past the limit if the port accepts that, up to the limit otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parity_audit.core.types import NotTested
from parity_audit.core.wire import RunReply, RunRequest

TIMES_ITS_LIMIT = 2
"""How many times its limit a port is asked to run."""
PAST_IT_AT_MOST = 2048
"""Positions beyond which no port is asked to exceed its limit.

The attention matrices of a longer text would cost more than the rest of an audit.
"""


def run_as_far_as_it_goes(
    request: RunRequest, limit: int | None, run: Callable[[RunRequest], RunReply], *, past: bool = True
) -> RunReply:
    """Run the whole probe, or as many of its first positions as the port takes, and report the others as not tested.

    The first positions of a causal model do not depend on later ones, so they can still be compared with the reference,
    which runs the whole probe. A probe whose rows are padded on the left cannot be shortened in this way: the first
    positions would be padding. It is run as a whole or not at all.

    Args:
        request: the run, with the probe.
        limit: number of positions that the port says it is made for; None if it has no limit.
        run: runs a request on the port.
        past: also try twice the limit, which some ports accept.

    Raises:
        Exception: the engine failed on a probe within its own limit. A failure beyond the limit is not raised: the
            probe is then run up to the limit.
    """
    length = request.probe.shape[1]
    if limit is None or length <= limit:
        return run(request)
    reasons = [f"this port is made for {limit} positions"]
    if not all(row[0] for row in request.probe.mask):
        gap = NotTested(what=f"probe {request.probe.name} ({length} positions)", why=reasons[0])
        return RunReply(entries=(), not_tested=(gap,))
    beyond = min(length, TIMES_ITS_LIMIT * limit)
    if past and beyond <= PAST_IT_AT_MOST:
        try:
            return _first(request, beyond, run, *reasons, "twice as many were run")
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            reasons.append(f"it refuses more ({type(error).__name__}: {first_line[:200]})")
    return _first(request, limit, run, *reasons)


def _first(request: RunRequest, count: int, run: Callable[[RunRequest], RunReply], *reasons: str) -> RunReply:
    """Run the first `count` positions of the probe and report the remaining ones as not tested, for these `reasons`."""
    length = request.probe.shape[1]
    reply = run(replace(request, probe=request.probe.columns(0, count)))
    if count == length:
        return reply
    gap = NotTested(what=f"positions {count} to {length - 1} of probe {request.probe.name}", why="; ".join(reasons))
    return replace(reply, positions=count, not_tested=(*reply.not_tested, gap))
