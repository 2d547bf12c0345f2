"""The smaller commands: specs, envs, doctor."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity_audit.cli import completion
from parity_audit.cli.errors import guarded
from parity_audit.core.by_layer import in_layers
from parity_audit.core.jsonio import dumps

specs = typer.Typer(help="Architectures and models that have a spec.", no_args_is_help=True, rich_markup_mode=None)
envs = typer.Typer(help="Environments of backends and releases.", no_args_is_help=True, rich_markup_mode=None)


@specs.command("list")
@guarded
def specs_list() -> int:
    """Every known model, by architecture."""
    from parity_audit import api

    for spec in api.specs():
        typer.echo(f"{spec.architecture}  ({spec.name}.yaml)")
        for repo_id, entry in spec.content.models.items():
            typer.echo(f"  {repo_id:40s} {', '.join(entry.aliases)}")
    return 0


@specs.command("show")
@guarded
def specs_show(
    model: Annotated[str, typer.Argument(help="Model or architecture file name.", autocompletion=completion.models)],
) -> int:
    """The constants of a model, and where each backend holds them."""
    from parity_audit import api

    shown = api.show_spec(model)
    typer.echo(f"{shown.repo_id}  {shown.spec.architecture}  {shown.spec.file}")
    for knob, value, holders in shown.knobs:
        text = in_layers(value, str) or str(value)
        typer.echo(f"  {knob:20s} {text:34s} set by: {', '.join(holders) or 'nobody'}")
    return 0


@envs.command("list")
@guarded
def envs_list() -> int:
    """Environments on disk, and releases with a tested recipe."""
    from parity_audit import api

    for key, backend, size in api.envs():
        typer.echo(f"{key:50s} {backend:18s} {size / 2**30:6.2f} GiB")
    typer.echo("tested releases: " + "; ".join(f"{name} {', '.join(known)}" for name, known in api.tested_releases()))
    return 0


@envs.command("create")
@guarded
def envs_create(
    backend: Annotated[
        str, typer.Argument(help="BACKEND, for example `transformer_lens==2.3.0`.", autocompletion=completion.backends)
    ],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> int:
    """Make the environment of a backend now."""
    from parity_audit import api
    from parity_audit.cli.progress import progress_for

    with progress_for(quiet=False) as progress:
        typer.echo(api.create_env(backend, device=device, progress=progress))
    return 0


@envs.command("remove")
@guarded
def envs_remove(
    key: Annotated[str, typer.Argument(help="Name, as `envs list` prints it.", autocompletion=completion.environments)],
) -> int:
    """Delete an environment."""
    from parity_audit import api

    api.remove_env(key)
    typer.echo(f"removed {key}")
    return 0


@guarded
def doctor(
    json: Annotated[bool, typer.Option("--json", help="The same as JSON on stdout, nothing else.")] = False,
) -> int:
    """What can run here, and why the rest cannot."""
    from parity_audit import api

    if json:
        typer.echo(dumps({"checks": api.doctor()}, indent=1))
        return 0
    table = Table(show_header=False, box=None)
    for check in api.doctor():
        table.add_row("ok" if check.ok else "no", Text(check.name), Text(check.why))
    Console().print(table)
    return 0
