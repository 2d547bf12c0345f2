"""A first word that is neither a command nor a model, but nearly a command: refused before it is looked for on the hub."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from parity_audit.core.choices import nearest
from parity_audit.core.errors import UsageError

NEARLY = 0.7
"""`adit` and `audit` are 0.89 alike, `spce` and `spec` 0.75; `opt` and `doctor` 0.67."""


def refuse_mistyped(word: str, commands: Iterable[str]) -> None:
    """Nothing where `word` may be a model.

    Raises:
        UsageError: it is nearly a command, and no known model, directory or hub id.
    """
    near = difflib.get_close_matches(word.lower(), tuple(commands), 1, NEARLY)
    if word.startswith("-") or "/" in word or not near or Path(word).is_dir():
        return
    from parity_audit.specs.load import list_specs

    entries = [item for spec in list_specs() for item in spec.content.models.items()]
    models = [name for repo_id, entry in entries for name in (repo_id, *entry.aliases)]
    if word.lower() not in (name.lower() for name in models):
        similar = nearest(word, models).removeprefix("did you mean ").removesuffix("?")
        raise UsageError(
            f"`{word}` is neither a command nor a known model", code="unknown-command",
            hint=f"did you mean the command `{near[0]}`{f', or the model {similar}' if similar else ''}?",
        )  # fmt: skip
