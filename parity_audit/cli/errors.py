"""Errors speak to the user: code, place, found, expected, what to do; and every one knows its exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import typer

from parity_audit.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_JUDGED,
    EXIT_USAGE,
    INTERNAL,
    ParityError,
    UsageError,
    explained,
)
from parity_audit.report import json
from parity_audit.report.escape import plain
from parity_audit.report.failure import failed_report

PARSER_ERROR: Any = typer.BadParameter.__mro__[1]
"""What the command line's parser raises, from whichever copy of it typer uses."""

AFTER_FINALIZER = 0.1
"""Seconds until an interruption that a finalizer swallowed is raised again; finalizers are done in less."""


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """Run a command, render what it raises, and exit with the right code. SIGTERM ends like Ctrl-C: no orphan; where Python drops
    the exception, because it was in a finalizer, it is raised again.

    With `--json` an error is a report too, so that a script reads one form whatever happens.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        before, hook = signal.signal(signal.SIGTERM, _interrupt), sys.unraisablehook
        sys.unraisablehook = functools.partial(_interrupt_again, hook)
        try:
            code = command(*args, **kwargs)
        except KeyboardInterrupt:
            _say(_interrupted())
            code = EXIT_INTERRUPTED
        except Exception as error:
            code = _failed(_explained(error), model=str(kwargs.get("model", "")), as_json=bool(kwargs.get("json")))
        finally:
            signal.signal(signal.SIGTERM, before)
            sys.unraisablehook = hook
        raise typer.Exit(code)

    run.__annotations__ = {**command.__annotations__, "return": None}
    return run


def _interrupted() -> str:
    """What is lost, and what the next run of the same question starts from."""
    from parity_audit.cache.root import cache_root
    from parity_audit.capture.workspace import CAPTURES, kept_captures
    from parity_audit.report.numbers import byte_size

    count, size = kept_captures(cache_root())
    if not count:
        return "interrupted: nothing was judged; nothing is left on disk but logs"
    return (
        f"interrupted: nothing was judged; finished captures are kept for the next run ({count}, {byte_size(size)}, in "
        f"{cache_root() / CAPTURES}); `parity-audit cache prune --kind captures` deletes them"
    )


def run_app(app: typer.Typer) -> int:
    """Run the program; an option or command that the parser refuses is an error like every other, with `--json` too."""
    try:
        return int(app(standalone_mode=False) or 0)
    except ParityError as error:
        refused = error
    except typer.Abort:
        return EXIT_INTERRUPTED
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return EXIT_USAGE
        refused = UsageError(error.format_message(), hint="`parity-audit --help`, or `parity-audit COMMAND --help`")
    return _failed(refused, model="", as_json="--json" in sys.argv)


def _explained(error: Exception) -> ParityError:
    """Any exception as an error that says what to do; a mistake of ours leaves its traceback in a file."""
    known = explained(error)
    if known is error or known.code != INTERNAL:
        return known
    with tempfile.NamedTemporaryFile("w", prefix="parity-audit-", suffix=".log", delete=False) as log:
        log.write("".join(traceback.format_exception(error)))
    return explained(error, log.name)


def _failed(error: ParityError, *, model: str, as_json: bool) -> int:
    if error.exit_code == EXIT_NOT_JUDGED:
        _say("nothing was judged")
    for line in error.lines():
        _say(line)
    if as_json:
        sys.stdout.write(json.dumps(failed_report(model, error)))
    return error.exit_code


def _say(text: str) -> None:
    """To stderr, control characters of foreign text made visible."""
    print(plain(text), file=sys.stderr)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupt_again(before: Callable[[Any], object], dropped: Any) -> None:
    """What Python does with an exception that a finalizer raises is to print it and go on. An interruption comes again, from another
    thread, when the finalizer is done."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(AFTER_FINALIZER, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        before(dropped)
