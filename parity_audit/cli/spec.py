"""`parity-audit spec`: work on specs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for

if TYPE_CHECKING:
    from parity_audit.specs.schema import Spec

EXIT_FAILED = 1

spec = typer.Typer(help="Check specs.", no_args_is_help=True, rich_markup_mode=None)


@spec.callback()
def _group() -> None:
    """Work on specs."""


@spec.command("check")
@guarded
def check(
    specs: Annotated[
        list[str] | None,
        typer.Argument(help="Spec names, YAML files or models, which stand for their spec; every shipped one when none."),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="BACKEND to check. Repeatable; all that run here when none.")
    ] = None,
    faults: Annotated[bool, typer.Option(help="Also plant errors in each model and see whether they are named.")] = False,
    mutate: Annotated[
        bool, typer.Option(help="Change every constant, one at a time: does the reference contradict it? Runs no backend.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the miniatures.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16: some backends compute an architecture in one of them alone.")
    ] = "float32",
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON result here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the Markdown page of architectures here.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int:  # fmt: skip
    """Run each spec's miniature on every backend: sites live, clean ports clean, constants those of the reference.

    Exit code 1 when a backend disagrees, the reference contradicts a constant, or a planted error was missed; with --mutate when
    fewer than 98 % of the changed constants are contradicted by name.
    """
    import json

    from parity_audit.speccheck.check import check_spec
    from parity_audit.speccheck.table import page
    from parity_audit.specs.load import OWN_SPECS, list_specs
    from parity_audit.specs.resolve import spec_named

    own = [str(Path(name).resolve()) for name in specs or () if name.endswith(".yaml")]
    if own:
        os.environ[OWN_SPECS] = os.pathsep.join(own)
    chosen = [spec_named(name) for name in specs] if specs else list_specs()
    if mutate:
        return _mutate(chosen, seed=seed, quiet=quiet, out=out)
    checks = []
    with progress_for(quiet=quiet) as progress:
        for one in chosen:
            done = check_spec(
                one, backend, faults=faults, seed=seed, dtype=dtype, install=not no_install, progress=progress
            )
            checks.append(done)
    if out is not None:
        out.write_text(json.dumps([_plain(done) for done in checks], indent=1) + "\n")
    if docs is not None:
        docs.write_text(page(checks))
    _print(checks)
    return 0 if all(done.ok for done in checks) else EXIT_FAILED


@spec.command("validate")
@guarded
def validate(
    files: Annotated[list[Path], typer.Argument(help="Spec files.")],
) -> int:
    """Is every file a spec? Reads and validates, runs nothing: for a pre-commit hook."""
    from parity_audit.core.errors import EXIT_USAGE, UsageError
    from parity_audit.specs.load import load_spec

    broken = 0
    for file in files:
        try:
            load_spec(file)
        except UsageError as error:
            broken += 1
            typer.echo(str(error), err=True)
    typer.echo(f"{len(files) - broken} of {len(files)} are valid")
    return EXIT_USAGE if broken else 0


@spec.command("schema")
@guarded
def schema() -> int:
    """The JSON Schema of spec files, for editors."""
    from parity_audit.specs.schema import schema_text

    typer.echo(schema_text(), nl=False)
    return 0


@spec.command("new")
@guarded
def new(
    model: Annotated[str, typer.Argument(help="Local directory with a config.json, or a hub id.")],
    repo_id: Annotated[str, typer.Option("--id", help="The hub id that the spec is for, where MODEL is a directory.")] = "",
    out: Annotated[Path | None, typer.Option(help="The file to write. [default: ARCHITECTURE.yaml]")] = None,
) -> int:  # fmt: skip
    """Draft a spec from a config and its module tree; what could not be inferred is marked TODO."""
    from parity_audit.speccheck.draft import draft_spec, written
    from parity_audit.specs.resolve import released_config

    config = released_config(model)
    draft = draft_spec(repo_id or Path(model).name if Path(model).is_dir() else model, config)
    path = written(draft, out or Path(f"{config.get('model_type', 'spec')}.yaml"))
    typer.echo(f"{path}: {len(draft.todo)} things to look at; then `parity-audit spec check {path}`")
    for line in draft.todo:
        typer.echo(f"  TODO {line}")
    return 0


def _mutate(chosen: Sequence[Spec], *, seed: int, quiet: bool, out: Path | None) -> int:
    """Change the constants of these specs and print how many were contradicted by name."""
    import json

    from parity_audit.speccheck.mutate import NAMED_SHARE, mutated

    with progress_for(quiet=quiet) as progress:
        found = {one.name: mutated(one, seed=seed, progress=progress) for one in chosen}
    table = Table("spec", "contradicted by name", "the rest")
    for name, results in found.items():
        rest = "; ".join(f"{one.knob} ({one.change}): {one.why}" for one in results if not one.named)
        table.add_row(*map(Text, (name, f"{sum(one.named for one in results)} of {len(results)}", rest)))
    everything = [one for results in found.values() for one in results]
    named = sum(one.named for one in everything)
    Console().print(table)
    typer.echo(f"{named} of {len(everything)} changed constants are contradicted by name")
    if out is not None:
        data = {name: [dataclasses.asdict(one) for one in results] for name, results in found.items()}
        out.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if everything and named >= NAMED_SHARE * len(everything) else EXIT_FAILED


def _plain(done: Any) -> dict[str, Any]:
    """One check as JSON: contradicted constants in words."""
    return {**dataclasses.asdict(done), "contradicted": [str(one) for one in done.contradicted], "ok": done.ok}


def _print(checks: list) -> None:  # type: ignore[type-arg]
    table = Table("spec", "backend", "result", "why")
    for done in checks:
        for pair in done.pairs:
            said = pair.status if pair.status != "ok" else f"ok ({pair.verdict})"
            table.add_row(*map(Text, (done.spec, f"{pair.backend} {pair.version}".strip(), said, pair.why)))
        result = "contradicted" if done.contradicted else "ok"
        words = (
            "; ".join(map(str, done.contradicted))
            or f"{done.components} components are what the spec's formulas make of their inputs"
        )
        table.add_row(done.spec, "formulas", result, Text(words))
        if done.not_excited:
            table.add_row(done.spec, "", "note", Text(f"not excited by the short probe: {', '.join(done.not_excited)}"))
        if done.planted:
            named = done.planted - len(done.missed)
            table.add_row(done.spec, "planted", f"{named} of {done.planted} named", Text(", ".join(done.missed)))
    Console().print(table)
