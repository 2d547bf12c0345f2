"""`parity-audit matrix`: parse, run the cells without a current card, print the table of all cards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli import completion
from parity_audit.cli.errors import guarded
from parity_audit.cli.live_table import ignored, progress_of_fleet
from parity_audit.cli.progress import progress_for
from parity_audit.core.choices import require_choice
from parity_audit.core.errors import UsageError

FORMATS = ("terminal", "markdown", "html", "json")
WIDTH = 160
"""One column per backend stands side by side, which takes more than a narrow terminal."""


@guarded
def matrix(
    model: Annotated[
        list[str] | None, typer.Argument(help="Models; `all` is one of every architecture. None: only show the cards.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            "-c",
            help="BACKEND, several releases in braces: 'transformer_lens=={3.9.0,4.3.0}'. Repeatable.",
            autocompletion=completion.backends,
        ),
    ] = None,
    reference: Annotated[str, typer.Option("--reference", "-r", help="BACKEND that is believed.")] = "hf",
    file: Annotated[Path | None, typer.Option(help="A matrix file (YAML) in place of MODEL and --candidate.")] = None,
    miniature: Annotated[
        bool, typer.Option("--miniature", help="Seeded tiny weights with the real constants.")
    ] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 (default), bfloat16 or float16. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    probe: Annotated[list[str] | None, typer.Option("--probe", help="Run only these probes. Repeatable.")] = None,
    no_repair: Annotated[bool, typer.Option("--no-repair", help="Diagnose only.")] = False,
    question: Annotated[
        list[str] | None, typer.Option(help="audit (default), logprobs or invariance. Repeatable; a table for each.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, where invariance is asked.")] = False,
    cards: Annotated[Path | None, typer.Option(help="Directory of the cards; default reports/cards.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run cells too whose card is current.")] = False,
    apart: Annotated[bool, typer.Option("--apart", help="One audit per cell, not one per model.")] = False,
    on: Annotated[
        str | None,
        typer.Option(help="A task per cell on a Ray cluster: `ray` makes one here, or name one: ray://HOST:PORT."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="With --on: where its machines keep cards and captures: s3://BUCKET/PREFIX, gs://, a directory."
        ),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="With --on: how often a cell is tried again that was lost with its machine.")
    ] = 3,
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Run nothing: list cells without a card as not run.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for matrix.md and matrix.html.")] = None,
    format: Annotated[
        str, typer.Option("--format", help="What to print: terminal, markdown, html or json.")
    ] = "terminal",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the counts.")] = False,
) -> int:
    """Ask every model with every candidate, keep a card of each answer, and show the table of all cards."""
    from parity_audit.matrix import command
    from parity_audit.matrix.cells import Matrix
    from parity_audit.matrix.fleet.run import Fleet

    if store is not None and on is None:
        raise UsageError("--store is of the machines of a cluster", hint="add --on ray, or drop it")
    require_choice(format, FORMATS, what="a format", code="unknown-format")
    asked = Matrix(
        models=tuple(model or ()), candidates=tuple(candidate or ()), reference=reference,
        synthetic="mini" if miniature else None, dtypes=tuple(dtype or ("float32",)), device=device,
        probes=tuple(probe or ()), repair=not no_repair, questions=tuple(question or ("audit",)), quick=quick,
    )  # fmt: skip
    with progress_of_fleet(quiet=quiet) if on else progress_for(quiet=quiet) as progress:
        fleet = Fleet(on=on, store=store, retries=retries, watch=getattr(progress, "watch", ignored)) if on else None
        table = command.answer(
            asked, file=file, folder=cards, again=again, together=not apart, install=not no_install, run=not no_run,
            fleet=fleet, progress=progress,
        )  # fmt: skip
    if out is not None:
        command.write(table, out)
    sys.stdout.write(command.rendered(table, format, width=WIDTH, quiet=quiet, colour=sys.stdout.isatty()))
    return table.exit_code
