"""Every error a user can meet, each with its code, its place, what to do next, and its exit code.

ParityError
├── UsageError        exit 2   wrong option, unknown model, bad spec
│   └── SpecError     exit 2   carries file, line and column
├── NotJudged         exit 3   could not compare reliably: nothing is claimed
│   ├── WorkerDied    exit 3   a backend crashed, was killed or ran out of time
│   ├── BackendFailed exit 3   a backend raised an exception
│   ├── CannotRun     exit 3   the spec says that this release does not run the architecture: the port did not fail
│   ├── EnvFailed     exit 3   an environment does not resolve or does not start
│   └── CaptureBroken exit 3   missing, truncated, altered or non-finite capture
└── Interrupted       exit 130 Ctrl-C
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_MISMATCH = 1
EXIT_USAGE = 2
EXIT_NOT_JUDGED = 3
EXIT_INTERRUPTED = 130

INTERNAL = "internal"
ENGINE_SETTING = "engine-setting"
ELSEWHERE = "choose another place with --out"
LESS_MEMORY = "use a smaller --dtype, fewer probes (--probe short), or a machine with more memory"


class ParityError(Exception):
    """An error that explains itself: what, where, what was expected and found, what to do next."""

    exit_code = EXIT_NOT_JUDGED
    default_code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        where: str = "",
        expected: str = "",
        found: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint

    def lines(self) -> list[str]:
        """The error as plain lines, readable without colour."""
        out = [f"error[{self.code}]: {self.message}"]
        if self.where:
            out.append(f"  --> {self.where}")
        for label in ("expected", "found", "hint"):
            text = getattr(self, label)
            if text:
                out.append(f"  {label}: {text}")
        return out

    def to_json(self) -> dict[str, Any]:
        """The error as the wire and the report carry it."""
        keys = ("code", "message", "where", "expected", "found", "hint")
        return {key: getattr(self, key) for key in keys}

    def __str__(self) -> str:
        return "\n".join(self.lines())


class UsageError(ParityError):
    """The question is malformed: wrong option, unknown model, unreadable spec."""

    exit_code = EXIT_USAGE
    default_code = "usage"


class SpecError(UsageError):
    """A model spec is wrong; `where` is `file:line:column`."""

    default_code = "spec"


class NotJudged(ParityError):
    """The comparison could not be made; nothing is said about parity."""

    default_code = "not-judged"


class WorkerDied(NotJudged):
    """A backend's process ended without answering."""

    default_code = "worker-died"


class BackendFailed(NotJudged):
    """A backend raised an exception; its process is still there."""

    default_code = "backend-failed"


class CannotRun(NotJudged):
    """The spec says why this release does not run the architecture; no failure of the port."""

    default_code = "cannot-run"


class EnvFailed(NotJudged):
    """An environment could not be resolved, built or started."""

    default_code = "env-failed"


class CaptureBroken(NotJudged):
    """A capture on disk is missing, truncated, altered or not finite."""

    default_code = "capture-broken"


class Interrupted(ParityError):
    """The user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED
    default_code = "interrupted"


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own error, or a tensor library's, which is a RuntimeError with such words."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except Exception:
        return False
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def raised_at(error: BaseException) -> str:
    """The file's name and the line that raised an exception; empty where it was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


@contextlib.contextmanager
def refusals_of_the_disk(doing: str, where: Path, hint: str = "") -> Iterator[None]:
    """A block that writes files in `where`; `doing` says what for, as in "write the report".

    Raises:
        NotJudged: the disk is full or read-only.
    """
    try:
        yield
    except OSError as error:
        raise NotJudged(
            f"cannot {doing}: {error.strerror or error}", code="disk", where=str(where), hint=hint
        ) from error


def explained(error: Exception, log: str = "") -> ParityError:
    """Any exception as an error that says what to do; `log` is the file that has its traceback."""
    if isinstance(error, ParityError):
        return error
    if is_out_of_memory(error):
        return NotJudged("parity-audit itself ran out of memory", code="out-of-memory", where=log, hint=LESS_MEMORY)
    if isinstance(error, OSError):
        return NotJudged(str(error), code="disk", hint=f"{ELSEWHERE}, or set PARITY_AUDIT_CACHE")
    return NotJudged(
        f"parity-audit itself failed: {type(error).__name__}: {error}", code="internal", where=log,
        hint="a mistake in parity-audit: please report it with that file",
    )  # fmt: skip
