"""`parity-audit ci`: the gate of a pull request."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli import completion
from parity_audit.cli.answer import write_answer
from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for

WIDTH = 100


@guarded
def ci(
    since: Annotated[str, typer.Option(help="Commit or branch that the change is counted from, e.g. `origin/main`.")] = "",
    matrix: Annotated[Path | None, typer.Option(help="YAML file of models x backends x versions x dtypes to audit.")] = None,
    specs: Annotated[Path, typer.Option(help="Folder of the repository's own specs.")] = Path("model_specs"),
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", help="BACKEND that judges changed specs. Repeatable; all that run here when none.",
                     autocompletion=completion.backends),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Model that changed pins are tried on. Repeatable; every spec's first when none.",
                     autocompletion=completion.models),
    ] = None,
    no_mutate: Annotated[bool, typer.Option("--no-mutate", help="Do not change the constants of changed specs.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often to ask again what the machine failed at; never numbers.")] = 1,
    allow_untouched: Annotated[
        bool, typer.Option("--allow-untouched", help="Exit 0 where the change touches no spec and no pin.")
    ] = False,
    annotations: Annotated[
        bool | None, typer.Option(help="Print GitHub's annotations. [default: in a GitHub workflow]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the miniatures.")] = 0,
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for gate.json, junit.xml, results.sarif and summary.md.")
    ] = Path("parity-audit-ci"),
    json: Annotated[bool, typer.Option("--json", help="gate.json on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the verdict.")] = False,
) -> int:  # fmt: skip
    """Judge what a change touches: changed specs, changed pins of engines, and the audits of a matrix file.

    Each changed spec: constants against the reference, constants changed one at a time, every backend, and the spec as a
    program against every backend. Exit code 1 when one failed, 3 when one could not be judged or nothing was compared.
    """
    from parity_audit.gate.files import write_gate
    from parity_audit.gate.run import GateOptions, run_gate
    from parity_audit.report.annotations import render
    from parity_audit.report.gate_content import gate_content, headline

    with progress_for(quiet=quiet or json) as progress:
        gate = run_gate(
            GateOptions(
                since=since, matrix=matrix, specs=specs, models=tuple(model or ()), backends=tuple(backend) if backend else None,
                mutate=not no_mutate, retries=retries, seed=seed, install=not no_install, untouched_passes=allow_untouched,
                out=out, progress=progress,
            )
        )  # fmt: skip
    write_gate(gate, out)
    if os.environ.get("GITHUB_ACTIONS") == "true" if annotations is None else annotations:
        (sys.stderr if json else sys.stdout).write(render(gate))
    return write_answer(gate, headline=headline, content=gate_content, json=json, quiet=quiet, width=WIDTH)
