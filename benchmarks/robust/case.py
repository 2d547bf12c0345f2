"""One bad input or fault, with the exit code and the error code or verdict that it has to have; and what came of it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

LIMIT_SECONDS = 10.0
"""Of processor time, for an input that has to be refused before anything runs."""
LIMIT_BYTES = 2 << 30
"""By which one refusal may raise the memory of the process."""
HANG_SECONDS = 120
CODE = re.compile(r"^error\[([a-z-]+)\]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`args` of the command line, made in a folder of the case's own; `says` is the error's code."""

    group: str
    name: str
    args: Callable[[Path], Sequence[str]]
    exit: int
    says: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case; `wrong` is empty where everything is as it has to be."""

    group: str
    name: str
    exit: int
    says: str
    seconds: float
    wrong: str = ""


def refused(case: Case, folder: Path) -> Outcome:
    """Run a command line that has to be refused, in this process, as the console script would."""
    from parity_audit.cli.app import main

    args, out, err = list(case.args(folder)), io.StringIO(), io.StringIO()
    memory, started, code = _memory(), time.process_time(), -1
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(HANG_SECONDS)
    try:
        with (
            mock.patch.object(sys, "argv", ["parity-audit", *args]),
            mock.patch.dict(os.environ),  # a command may set variables for its workers; the next case has its own
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException as error:  # what escapes here is what this table is for
        err.write(f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    seconds, text = time.process_time() - started, err.getvalue()
    said = CODE.findall(text)
    found = said[0] if said else ""
    wrong = [
        f"exit {code}, not {case.exit}" * (code != case.exit),
        f"`{found}`, not `{case.says}`" * (found != case.says),
        "traceback" * ("Traceback" in text),
        f"{seconds:.0f} s" * (seconds > LIMIT_SECONDS),
        "memory" * (_memory() - memory > LIMIT_BYTES),
    ]
    return Outcome(
        group=case.group, name=case.name, exit=code, says=found, seconds=seconds, wrong="; ".join(filter(None, wrong))
    )


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _hung(*_: object) -> None:
    raise TimeoutError("hang")
