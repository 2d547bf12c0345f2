"""The cost estimate of an audit as blocks for the terminal: needed and free memory and disk, and the cost of each probe."""

from __future__ import annotations

from parity_audit.core.cost import AuditCost
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, styled
from parity_audit.report.numbers import byte_size, seconds

NOTES = (
    "One model is held at a time. A further candidate takes the time of a run and the disk of a capture; one that departs is run "
    "again with each patch.",
    "Time is what the products of matrices take at the speed just measured here: the least that it can be.",
)


def headline(cost: AuditCost) -> str:
    """Return whether the audit fits on this machine, and its memory, disk space and time, in one line."""
    fits = "fits" if cost.fits else "does not fit"
    return (
        f"An audit of {cost.model} in {cost.dtype} {fits} here: {byte_size(cost.memory_bytes)} of memory, "
        f"{byte_size(cost.disk_bytes)} of disk, at least {seconds(cost.seconds)}"
    )


def cost_content(cost: AuditCost, *, where: str = "") -> list[Block]:
    """Return the whole estimate; the time is divided among the probes in proportion to their tokens."""
    share = cost.seconds / max(sum(one.tokens for one in cost.probes), 1)
    rows = [(one.name, str(one.tokens), byte_size(one.audit_bytes), seconds(one.tokens * share)) for one in cost.probes]
    memory = f"{byte_size(cost.memory_bytes)}, {byte_size(cost.weight_bytes)} of it weights"
    disk = f"{byte_size(cost.disk_bytes)} for the reference, its judge and one candidate"
    about = [
        ("architecture", cost.architecture),
        ("parameters", _parameters(cost)),
        ("memory", f"{memory}; free {byte_size(cost.free_memory_bytes)}"),
        ("disk", f"{disk}; free {byte_size(cost.free_disk_bytes)}"),
    ]
    table: list[Block] = [heading("What each probe takes"), columns(("probe", "tokens", "disk", "time"), rows)]
    if cost.most_disk_bytes:
        bound = "" if cost.disk_bound_bytes is None else f"; --disk allows {byte_size(cost.disk_bound_bytes)}"
        about.append(("at most", f"{byte_size(cost.most_disk_bytes)} of disk where a candidate departs{bound}"))
    if cost.left_out:
        table += [SPACE, heading("Left out"), pairs((gap.what, gap.why) for gap in cost.left_out)]
    notes: list[Block] = [heading("Notes"), pairs(("", note) for note in (*NOTES, *_advice(cost)))]
    return [styled((headline(cost), BOLD), level=1), pairs(about), SPACE, *table, SPACE, *notes]


def _parameters(cost: AuditCost) -> str:
    met = "" if cost.active == cost.parameters else f", of which a token meets {cost.active:,}"
    return f"{cost.parameters:,}{met}"


def _advice(cost: AuditCost) -> list[str]:
    """Return a note that names the probe with the largest captures, if it needs at least half of the disk space.

    The note has the options that run the other probes only.
    """
    if len(cost.probes) < 2 or cost.left_out:
        return []
    dearest = max(cost.probes, key=lambda one: one.native_bytes)
    rest = cost.disk_bytes - dearest.audit_bytes
    if rest > cost.disk_bytes / 2:
        return []
    others = " ".join(f"--probe {one.name}" for one in cost.probes if one is not dearest)
    return [f"Without `{dearest.name}` it is {byte_size(rest)} of disk: {others}"]
