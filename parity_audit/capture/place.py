"""Move finished captures to the user's directory, which is replaced completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from parity_audit.cache.locks import hold, hold_if_free
from parity_audit.capture.store import MANIFEST_HASH, Capture
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.manifest import MANIFEST_NAME

JUDGE_FOLDER = "judge"
LOGS = "logs"
ALIVE = "parity_audit_alive.lock"
"""A file that marks a staging directory of this tool; it is locked as long as the process that made the directory lives."""
SUFFIXES = (".safetensors", ".part")
SITE_FILE = re.compile(r"(embed|logits|blocks\.\d+\.\w+)[.\w]*\.(safetensors|part)$")


def require_replaceable(out: Path) -> None:
    """Refuse an output directory that holds anything but a capture, before a model is run.

    Raises:
        UsageError: a file that no capture wrote would be lost.
    """
    if out.exists() and not out.is_dir():
        raise _foreign(out, out)
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        if not _of_a_capture(path):
            raise _foreign(out, path)


def place(taken: Mapping[str, Capture], out: Path) -> None:
    """Replace `out` by these captures, each in the subfolder given by its key ("" is `out` itself); logs are kept.

    Everything is copied to a directory beside `out` first. The earlier capture, with its `judge` subfolder, is deleted only
    when the new one is complete.

    Raises:
        NotJudged: the disk is full or read-only; `out` is unchanged.
    """
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _reclaim(out)
        staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
        alive = hold(staging / ALIVE)
    except OSError as error:
        raise _no_room(out, error) from error
    try:
        new, old = staging / "new", staging / "old"
        for folder, capture in taken.items():
            shutil.copytree(capture.folder, new / folder, dirs_exist_ok=True)
        if (out / LOGS).is_dir():
            shutil.copytree(out / LOGS, new / LOGS)
        _swap(new, out, old)
    except (OSError, shutil.Error) as error:
        raise _no_room(out, error) from error
    finally:
        if out.exists() or not old.exists():  # else the earlier capture could not be put back: it stays in `staging`
            shutil.rmtree(staging, ignore_errors=True)
        alive.release()


def _reclaim(out: Path) -> None:
    """Clean up what a killed process left beside `out`: put back an earlier capture that it had moved away, delete the rest."""
    for staging in (folder for folder in out.parent.iterdir() if folder.name.startswith(f".{out.name}-")):
        lock = hold_if_free(staging / ALIVE) if (staging / ALIVE).is_file() else None
        if lock is not None:
            if (staging / "old").is_dir() and not out.exists():
                os.rename(staging / "old", out)
            shutil.rmtree(staging, ignore_errors=True)
            lock.release()


def _swap(new: Path, out: Path, old: Path) -> None:
    """Move `out` to `old` and `new` to `out`; if the second rename fails, the first is undone."""
    there = out.is_dir()
    if there:
        os.rename(out, old)
    try:
        os.rename(new, out)
    except OSError:
        if there:
            os.rename(old, out)
        raise


def _of_a_capture(path: Path) -> bool:
    """Whether a path belongs to a complete or incomplete capture: manifest, logs, judge, or the folder of a probe's tensors.

    A folder of tensors is recognised by a file named after a site: the embedding is the first site that a run writes, and no
    file of weights is named like it.
    """
    if path.name in (MANIFEST_NAME, MANIFEST_HASH, JUDGE_FOLDER, LOGS):
        return True
    files = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    return all(name.endswith(SUFFIXES) for name in files) and (not files or any(map(SITE_FILE.match, files)))


def _foreign(out: Path, path: Path) -> UsageError:
    return UsageError(
        f"{out} is not a capture: it holds `{path.name}`, which would be lost", code="out-not-empty", where=str(path),
        hint="give an empty or new directory, or that of an earlier capture, to --out",
    )  # fmt: skip


def _no_room(out: Path, error: Exception) -> NotJudged:
    return NotJudged(
        f"cannot write the capture: {error}", code="disk", where=str(out),
        hint="what was there before is unchanged; make room, or choose another place with --out",
    )  # fmt: skip
