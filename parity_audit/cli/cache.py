"""`parity-audit cache`: what is kept between audits, how large it is, and deleting what can go."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from parity_audit.cli.errors import guarded

cache = typer.Typer(help="What is kept between audits.", no_args_is_help=True, rich_markup_mode=None)
GIB = 2**30


@cache.command("list")
@guarded
def cache_list() -> int:
    """Everything in the cache: kind, size, age, and whether it is in use."""
    from parity_audit import api

    for item in api.stored():
        used = "  in use" if item.in_use else ""
        typer.echo(f"{item.kind:13s} {item.bytes / GIB:8.3f} GiB {item.days:6.1f} days  {item.name}{used}")
    return 0


@cache.command("size")
@guarded
def cache_size() -> int:
    """Size of every kind of thing. Files that environments share with uv's own cache are counted in each."""
    from parity_audit import api

    items = api.stored()
    number, size = Counter(item.kind for item in items), Counter[str]()
    for item in items:
        size[item.kind] += item.bytes
    for kind in number:
        typer.echo(f"{kind:13s} {size[kind] / GIB:8.3f} GiB in {number[kind]}")
    typer.echo(f"{'total':13s} {size.total() / GIB:8.3f} GiB in {number.total()}  {api.cache_root()}")
    return 0


@cache.command("prune")
@guarded
def cache_prune(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            "-k",
            help="Also delete: environments, synthetic, captures, workers. Repeatable; what is in use stays.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every kind.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted.")] = False,
) -> int:
    """Delete what nobody will read again: things set aside because they were damaged, and leftovers of killed runs."""
    from parity_audit import api

    gone = api.prune(kind or (), everything=everything, dry_run=dry_run)
    for item in gone:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {item.kind} {item.name}")
    typer.echo(f"{sum(item.bytes for item in gone) / GIB:.3f} GiB {'could be' if dry_run else 'was'} freed")
    return 0
