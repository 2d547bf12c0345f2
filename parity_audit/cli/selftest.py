"""`parity-audit selftest`: the planted-fault corpus against the auditor itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from parity_audit.cli import completion
from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for

EXIT_MISSED = 1


@guarded
def selftest(
    all_faults: Annotated[bool, typer.Option("--all", help="The whole corpus; the default is a small subset.")] = False,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Only faults in this model. Repeatable.")
    ] = None,
    fault: Annotated[list[str] | None, typer.Option("--fault", help="Only the fault of this id. Repeatable.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only faults with this tag: `stacked`.")] = None,
    no_repair: Annotated[bool, typer.Option("--no-repair", help="Diagnose only.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the miniatures.")] = 0,
    synthetic: Annotated[
        str, typer.Option(help="Kind of the miniatures.", **completion.fixed(*completion.SIZES))
    ] = "mini",
    out: Annotated[Path | None, typer.Option(help="Write the JSON result here, after every audit.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int:
    """Plant known faults in miniature models and see whether the auditor finds, places, names and mends them.

    Exit code 1 when a planted fault was missed or misnamed, a finding names nothing that was planted, or a clean port was accused.
    """
    import json

    from parity_audit.selftest.corpus import load_corpus
    from parity_audit.selftest.run import Result, run_corpus
    from parity_audit.selftest.table import misjudged, to_json

    corpus = load_corpus(model)
    if fault:
        corpus = corpus.only(fault)
    elif tag:
        corpus = corpus.tagged(tag)
    elif not all_faults:
        corpus = corpus.quick()

    def keep(result: Result) -> None:
        if out is not None:
            out.write_text(json.dumps(to_json(result), indent=1) + "\n")

    with progress_for(quiet=quiet) as progress:
        result = run_corpus(corpus, repair=not no_repair, seed=seed, synthetic=synthetic, progress=progress, keep=keep)
    content = to_json(result)
    _print(content)
    return EXIT_MISSED if misjudged(result.scores) or content["clean"]["accused"] else 0


def _print(content: dict) -> None:  # type: ignore[type-arg]
    console = Console()
    groups = [("all", content["hits"]), *content["by_origin"].items()]
    table = Table("planted faults", *(name for name, _ in groups), "share")
    for label, row in content["hits"].items():
        share = f"{100 * row['right'] / row['asked']:.0f} %" if row["asked"] else "-"
        table.add_row(label, *(f"{rows[label]['right']} of {rows[label]['asked']}" for _, rows in groups), share)
    table.add_row("findings too many", str(content["findings_too_many"]), "", "", "")
    clean = content["clean"]
    table.add_row("clean ports accused", f"{clean['accused']} of {clean['asked']}", "", "", "")
    console.print(table)
    if content["stacked"]:
        said = ", ".join(f"{what} {count}" for what, count in content["stacked"].items())
        console.print(f"stacked faults: {said}", highlight=False)
    for score in content["missed"]:
        console.print(
            f"  {score['id']}: {score['wrong']}; found {score['found'] or 'nothing'}", markup=False, highlight=False
        )
