"""`parity-audit lint`: an engine's own config of released models against the constants of their specs."""

from __future__ import annotations

from typing import Annotated

import typer

from parity_audit.cli import completion
from parity_audit.cli.answer import write_answer
from parity_audit.cli.errors import guarded
from parity_audit.cli.progress import progress_for
from parity_audit.core.errors import UsageError

WIDTH = 120


@guarded
def lint(
    model: Annotated[str | None, typer.Argument(help="One model.", autocompletion=completion.models)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every name of the engine that has a spec and a config.")] = False,
    candidate: Annotated[
        str, typer.Option("--candidate", "-c", help="BACKEND to read.", autocompletion=completion.backends)
    ] = "transformer_lens",
    no_install: Annotated[bool, typer.Option("--no-install", help="Never create an environment.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, and only the answer.")] = False,
) -> int:  # fmt: skip
    """Hold an engine's own config of released models against their specs: no weights, nothing is computed.

    HookedTransformer's table is built by its own code, in its own environment; for vLLM and transformers it is what they
    read out of the released config.json. Exit code 1 when a constant departs, 3 when nothing could be compared.
    """
    from parity_audit.core.backend_ref import parse_backend
    from parity_audit.lint.run import run_lint
    from parity_audit.report.lint_content import headline, lint_content

    if (model is None) != everything:
        raise UsageError("name one MODEL, or --all", code="lint-model", hint="`parity-audit lint --all`")
    with progress_for(quiet=quiet or json) as progress:
        report = run_lint(model, parse_backend(candidate), install=not no_install, progress=progress)
    return write_answer(report, headline=headline, content=lint_content, json=json, quiet=quiet, width=WIDTH)
