"""Where an audit keeps its files: captures in the cache until the audit has succeeded, the report in the out directory."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.envs.cache import cache_root


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """`out` holds the report and the workers' logs, `captures` the tensors."""

    out: Path
    cache: Path
    captures: Path

    @staticmethod
    def open(out: Path | None, model: str) -> Workspace:
        """Make the directories.

        Raises:
            NotJudged: the disk is read-only or full.
        """
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = out or Path("reports") / f"{slug(model)}-{stamp}"
        cache = cache_root()
        captures = cache / "captures"
        for folder in (out / "logs", captures):
            make_folder(folder)
        return Workspace(out=out.resolve(), cache=cache, captures=captures)

    def log(self, name: str) -> Path:
        """Log file of one worker."""
        return self.out / "logs" / f"{slug(name)}.log"

    def capture_dir(self, key: str) -> Path:
        """Directory of the capture with this plan key."""
        return self.captures / key


def make_folder(folder: Path) -> None:
    """Create a directory, or say what to do when the disk does not let us."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise NotJudged(
            f"cannot write to {folder}: {error.strerror or error}",
            code="disk", where=str(folder), hint="choose another place with --out, or set PARITY_AUDIT_CACHE",
        ) from error  # fmt: skip


def slug(text: str) -> str:
    """A file name made of `text`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "model"


def remove_captures(folders: list[Path]) -> None:
    """Delete captures that nothing needs any more."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
