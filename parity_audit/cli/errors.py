"""Errors speak to the user: code, place, found, expected, what to do; and every one knows its exit code."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

from parity_audit.core.errors import EXIT_INTERRUPTED, EXIT_NOT_JUDGED, ParityError


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """Run a command, render what it raises, and exit with the right code. SIGTERM ends like Ctrl-C: no orphan."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            code = command(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted: nothing was judged; captures already taken are kept", file=sys.stderr)
            code = EXIT_INTERRUPTED
        except ParityError as error:
            code = error.exit_code
            if code == EXIT_NOT_JUDGED:
                print("nothing was judged", file=sys.stderr)
            print("\n".join(error.lines()), file=sys.stderr)
        except OSError as error:
            print(f"nothing was judged\nerror[disk]: {error}", file=sys.stderr)
            code = EXIT_NOT_JUDGED
        raise typer.Exit(code)

    run.__annotations__ = {**command.__annotations__, "return": None}
    return run


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
