"""Every error that a user can meet, each with its code, its place, what to do next, and its exit code.

ParityError
├── UsageError        exit 2   wrong option, unknown model, bad spec
│   └── SpecError     exit 2   has file, line and column
├── NotJudged         exit 3   the comparison was not reliable: no claim is made
│   ├── WorkerDied    exit 3   a backend crashed, was killed or ran out of time
│   ├── BackendFailed exit 3   a backend raised an exception
│   ├── CannotRun     exit 3   the spec says that this release does not run the architecture: no failure of the port
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
    """An error with its explanation: what happened, where, what was expected and found, and what to do next."""

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
        """Return the error as the wire and the report hold it."""
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
    """The comparison could not be made; no claim about parity is made."""

    default_code = "not-judged"


class WorkerDied(NotJudged):
    """A backend's process ended without a reply."""

    default_code = "worker-died"


class BackendFailed(NotJudged):
    """A backend raised an exception; its process is still running."""

    default_code = "backend-failed"


class CannotRun(NotJudged):
    """The spec says that this release does not run the architecture, and why; this is not a failure of the port."""

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
    """Return whether an exception means lack of memory: Python's own, or a tensor library's RuntimeError with such a
    message."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except Exception:
        return False
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def raised_at(error: BaseException) -> str:
    """Return the file name and line where an exception was raised; empty if it was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


@contextlib.contextmanager
def refusals_of_the_disk(doing: str, where: Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError in the block into a NotJudged; `doing` says what the block does, as in "write the report".

    Raises:
        NotJudged: the disk is full or read-only, or refuses the files in `where` for another reason.
    """
    try:
        yield
    except OSError as error:
        raise NotJudged(
            f"cannot {doing}: {error.strerror or error}", code="disk", where=str(where), hint=hint
        ) from error


def explained(error: Exception, log: str = "") -> ParityError:
    """Return any exception as an error that says what to do next; `log` is the file with its traceback."""
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
