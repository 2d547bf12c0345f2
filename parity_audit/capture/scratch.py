"""A bound on what an audit writes beside its report, looked at before each run of a backend."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from rich.filesize import decimal

from parity_audit.core.errors import NotJudged

DISK_BOUND = "disk-bound"


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """At most `bound` bytes below `folder`, beside what was there when this was made (captures of an earlier audit)."""

    folder: Path
    bound: int
    before: int = field(default=0)

    @staticmethod
    def of(folder: Path, bound: int | None) -> Scratch | None:
        """A bound on what is written below `folder` from now on; None where there is none."""
        return None if bound is None else Scratch(folder=folder, bound=bound, before=bytes_below(folder))

    def require(self, needed: int, what: str) -> None:
        """Refuse a run that would write more than is left.

        Raises:
            NotJudged: its numbers do not fit.
        """
        used = max(0, bytes_below(self.folder) - self.before)
        if used + needed > self.bound:
            raise NotJudged(
                f"{what} does not fit into --disk: it writes up to {decimal(needed)}, and {decimal(used)} of "
                f"{decimal(self.bound)} are used", code=DISK_BOUND,
                hint="give more with --disk; --no-repair and --quick need less",
            )  # fmt: skip


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder, which workers may write to and delete from meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):  # what vanishes meanwhile is passed over
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
