"""How far a port runs: past its own limit where it accepts that, up to it where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parity_audit.core.types import NotTested
from parity_audit.core.wire import RunReply, RunRequest

TIMES_ITS_LIMIT = 2
PAST_IT_AT_MOST = 2048
"""Positions; attention matrices of a longer text would cost more than the rest of an audit."""


def run_as_far_as_it_goes(
    request: RunRequest, limit: int | None, run: Callable[[RunRequest], RunReply], *, past: bool = True
) -> RunReply:
    """Run a probe whole, or as many of its first positions as the port takes; what that leaves out is a gap.

    A causal model's first positions do not depend on the rest, so they are compared with the reference's own. A probe that
    is padded on the left has no such beginning: it is run whole or not at all.

    Args:
        limit: positions that the port says it is made for.
        past: also try twice that, which some ports accept.

    Raises:
        Exception: what the engine raises within its own limit.
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
    """The first `count` positions, and what that leaves untested."""
    length = request.probe.shape[1]
    reply = run(replace(request, probe=request.probe.columns(0, count)))
    if count == length:
        return reply
    gap = NotTested(what=f"positions {count} to {length - 1} of probe {request.probe.name}", why="; ".join(reasons))
    return replace(reply, positions=count, not_tested=(*reply.not_tested, gap))
