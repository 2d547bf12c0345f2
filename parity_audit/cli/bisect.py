"""`parity-audit bisect`: which release broke or repaired parity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli import completion
from parity_audit.cli.answer import write_answer
from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for
from parity_audit.workers.client import TIMEOUT

WIDTH = 100


@guarded
def bisect(
    model: Annotated[str, typer.Argument(help="Model whose miniature is run.", autocompletion=completion.models)],
    candidate: Annotated[
        str, typer.Option("--candidate", "-c", help="BACKEND without a version.", autocompletion=completion.backends)
    ],
    good: Annotated[str, typer.Option(help="A release without the fault, older or newer than the bad one.")],
    bad: Annotated[str, typer.Option(help="A release with the fault.")],
    reference: Annotated[
        str, typer.Option("--reference", "-r", help="BACKEND that is believed.", autocompletion=completion.backends)
    ] = "hf",
    seed: Annotated[int, typer.Option(help="Seed of the miniature.")] = 0,
    no_install: Annotated[bool, typer.Option("--no-install", help="Only releases that have an environment.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that a release may take for one request.")] = TIMEOUT,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bisect.json and every release's report; a second run goes on from it.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="bisect.json on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the answer.")] = False,
) -> int:  # fmt: skip
    """Find the release that broke or repaired parity, by running releases in environments of their own.

    Releases are ordered by the day of their upload. One that does not install, does not know the model or crashes is
    skipped, and named where the change may be in it.
    """
    from parity_audit.bisection.run import run_bisection
    from parity_audit.core.backend_ref import parse_backend
    from parity_audit.report.bisect_content import bisect_content, headline

    with progress_for(quiet=quiet or json) as progress:
        report = run_bisection(
            model, parse_backend(candidate), good=good, bad=bad, reference=reference, seed=seed, install=not no_install,
            timeout=timeout, out=out, progress=progress,
        )  # fmt: skip
    return write_answer(report, headline=headline, content=bisect_content, json=json, quiet=quiet, width=WIDTH)
