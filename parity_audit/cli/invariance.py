"""`parity-audit invariance`: parse, ask, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli.asked import keep_cards
from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for
from parity_audit.core.card import Question


@guarded
def invariance(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, alias or local directory.")],
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", "-c", help="BACKEND to ask (repeatable); default: every one that can run here."),
    ] = None,
    reference: Annotated[
        str, typer.Option("--reference", "-r", help="BACKEND whose float64 run measures the noise floor.")
    ] = "hf",
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, few completions, no second process.")] = False,
    max_batch: Annotated[int | None, typer.Option(help="Largest batch: 33, or 9 with --quick.")] = None,
    completions: Annotated[int | None, typer.Option(help="Greedy completions under changing load.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of each completion.")] = None,
    miniature: Annotated[
        bool, typer.Option("--miniature", help="Seeded tiny weights with the real constants.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the tokens, the neighbours and synthetic weights.")] = 0,
    weights: Annotated[Path | None, typer.Option(help="Directory with config.json and *.safetensors.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for the report and the logs.")] = None,
    format: Annotated[
        str, typer.Option("--format", help="What to print: terminal, markdown, html, json, junit or sarif.")
    ] = "terminal",
    card: Annotated[bool, typer.Option("--card", help="Write a card of each candidate into reports/cards.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the verdict.")] = False,
) -> int:
    """Does the answer depend on the batch, the cache, the chunks or the threads, and by how much?"""
    from parity_audit import api
    from parity_audit.cli.show import require_format, show

    require_format(format)
    with progress_for(quiet=quiet or json) as progress:
        report = api.invariance(
            model, candidates=candidate, reference=reference, quick=quick, max_batch=max_batch, completions=completions,
            new_tokens=new_tokens, miniature="mini" if miniature else None, seed=seed, weights=weights, dtype=dtype,
            device=device, install=not no_install, out=out, progress=progress,
        )  # fmt: skip
    if card:
        keep_cards(
            context, report, Question.INVARIANCE, given=candidate, reference=reference,
            synthetic="mini" if miniature else None, seed=seed, dtype=dtype, device=device,
        )  # fmt: skip
    show(report, "json" if json else format, quiet=quiet)
    return report.exit_code
