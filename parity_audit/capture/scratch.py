"""A bound on the bytes that an audit writes besides its report, checked before each run of a backend."""

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
    """A bound of `bound` bytes on new files below `folder`; bytes already there at the start (`before`) do not count."""

    folder: Path
    bound: int
    before: int = field(default=0)

    @staticmethod
    def of(folder: Path, bound: int | None) -> Scratch | None:
        """Return a bound on what is written below `folder` from now on; None if `bound` is None."""
        return None if bound is None else Scratch(folder=folder, bound=bound, before=bytes_below(folder))

    def require(self, needed: int, what: str) -> None:
        """Refuse a run that would write more bytes than the bound still allows.

        Raises:
            NotJudged: the `needed` bytes do not fit.
        """
        used = max(0, bytes_below(self.folder) - self.before)
        if used + needed > self.bound:
            raise NotJudged(
                f"{what} does not fit into --disk: it writes up to {decimal(needed)}, and {decimal(used)} of "
                f"{decimal(self.bound)} are used", code=DISK_BOUND,
                hint="give more with --disk; --no-repair and --quick need less",
            )  # fmt: skip


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; workers may write and delete files there at the same time."""
    total = 0
    for place, _, files in os.walk(folder):  # files that vanish meanwhile are skipped
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
