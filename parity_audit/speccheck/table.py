"""The results of spec checks as the page of the manual that lists architectures and backends."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.report.escape import markdown
from parity_audit.speccheck.check import KNOWN, NOT_RUN, OK, PairCheck, SpecCheck

HEAD = """# Architectures

Made by `parity-audit spec check --docs docs/architectures.md`: every architecture's miniature, in float32 on the CPU, on every
backend that was asked. *exact* and *parity* are the verdicts against transformers in eager attention; the last column lists sites
that a backend does not show, or says why it was not run, or what it does otherwise. *known error* is an error of that release that
the spec lists with its cause: the check asks for precisely these, and fails when one more is found, or one is gone.

| architecture | spec | backend | result | not visible, or why not |
|---|---|---|---|---|
"""


def page(checks: Sequence[SpecCheck]) -> str:
    """Return the page as Markdown, with one row per spec and backend."""
    rows = [_row(check, pair) for check in checks for pair in check.pairs]
    return HEAD + "\n".join(rows) + "\n"


def _row(check: SpecCheck, pair: PairCheck) -> str:
    result = {OK: pair.verdict, NOT_RUN: NOT_RUN, KNOWN: f"**{pair.verdict}** ({KNOWN})"}.get(
        pair.status, f"**{pair.verdict}**"
    )
    about = pair.why or ", ".join(pair.hidden)
    name = f"{pair.backend} {pair.version}".strip()
    cells = (markdown(check.architecture), f"`{check.spec}`", markdown(name), result, markdown(about))
    return "| " + " | ".join(cells) + " |"
