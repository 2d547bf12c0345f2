"""`parity-audit plan`: what an audit will need, before anything is downloaded, loaded or run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli import completion
from parity_audit.cli.answer import write_answer
from parity_audit.cli.errors import guarded
from parity_audit.cli.memory import bytes_of

WIDTH = 100


@guarded
def plan(
    model: Annotated[str, typer.Argument(help="Hub id, alias or local directory.", autocompletion=completion.models)],
    weights: Annotated[Path | None, typer.Option(help="Directory with config.json.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16.", **completion.fixed(*completion.DTYPES))
    ] = "float32",
    probe: Annotated[
        list[str] | None,
        typer.Option("--probe", help="Only these probes. Repeatable.", autocompletion=completion.probes),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="For `audit --quick`.")] = False,
    no_repair: Annotated[bool, typer.Option("--no-repair", help="For `audit --no-repair`.")] = False,
    disk: Annotated[str | None, typer.Option("--disk", help="For `audit --disk`, for example 10GiB.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer.")] = False,
) -> int:
    """Say what an audit of MODEL will need: memory, disk and time, and which probe they go to. Nothing is downloaded but its config.

    Exit code 3 when memory or disk do not suffice here.
    """
    from parity_audit.capture.estimate import planned_cost
    from parity_audit.report.cost_content import cost_content, headline

    cost = planned_cost(
        model,
        weights=weights,
        probes=probe,
        dtype=dtype,
        quick=quick,
        repair=not no_repair,
        disk=None if disk is None else bytes_of(disk),
    )
    return write_answer(cost, headline=headline, content=cost_content, json=json, quiet=quiet, width=WIDTH)
