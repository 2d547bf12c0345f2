"""How every kind of finished report is drawn: one path from the report to each format, on stdout and as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from parity_audit.core.invariance_report import INVARIANCE_SCHEMA_VERSION, InvarianceReport
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.logprob_report import LOGPROB_SCHEMA_VERSION, LogprobReport, TokenTable
from parity_audit.core.report import SCHEMA_VERSION, Report
from parity_audit.report import audit_page, invariance_page, junit, logprob_page, markdown, sarif, words
from parity_audit.report.blocks import Block
from parity_audit.report.cases import gate_of
from parity_audit.report.content import content
from parity_audit.report.invariance_content import headline as invariance_headline
from parity_audit.report.invariance_content import invariance_content
from parity_audit.report.logprob_content import headline as logprob_headline
from parity_audit.report.logprob_content import logprob_content
from parity_audit.report.terminal import WIDTH, printed

Finished = Report | LogprobReport | InvarianceReport
FORMATS = ("terminal", "markdown", "html", "json", "junit", "sarif")
LOGPROB_WIDTH, INVARIANCE_WIDTH = 110, 120
"""Columns that stand side by side take more than a narrow terminal."""
FILES = {".json": "json", ".md": "markdown", ".txt": "terminal", ".html": "html"}
"""What a run leaves in its directory, by the ending of the name; report.json is the one that is read again."""
KINDS: dict[str, tuple[type, int]] = {
    "legs": (LogprobReport, LOGPROB_SCHEMA_VERSION),
    "subject": (InvarianceReport, INVARIANCE_SCHEMA_VERSION),
    "candidates": (Report, SCHEMA_VERSION),
}
"""Which report a file holds, by a key that only this kind of those not yet tried has."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One finished report, ready to be drawn. `stem` is the name of its files; `blocks` takes the path that is named at the end."""

    stem: str
    width: int
    brief: str
    blocks: Callable[[str], list[Block]]
    page: Callable[[], str]


def view_of(report: Finished, tokens: TokenTable | None = None) -> View:
    """How one report is drawn. `tokens` are those of log-probabilities, without which their page has no pictures."""
    if isinstance(report, LogprobReport):
        return View(
            stem="logprobs", width=LOGPROB_WIDTH, brief=logprob_headline(report),
            blocks=lambda where: logprob_content(report, where=where), page=partial(logprob_page.render, report, tokens),
        )  # fmt: skip
    if isinstance(report, InvarianceReport):
        return View(
            stem="invariance", width=INVARIANCE_WIDTH, brief=invariance_headline(report),
            blocks=lambda where: invariance_content(report, where=where), page=partial(invariance_page.render, report),
        )  # fmt: skip
    verdicts = (f"{words.label(one)}: {one.verdict.value}" for one in report.candidates)
    return View(
        stem="report", width=WIDTH, brief="\n".join((words.headline(report), *verdicts)),
        blocks=lambda where: content(report, where=where), page=partial(audit_page.render, report),
    )  # fmt: skip


def rendered(
    report: Finished, format: str, *, where: str = "", tokens: TokenTable | None = None, quiet: bool = False,
    colour: bool = False, ascii_only: bool = False,
) -> str:  # fmt: skip
    """A report in one of `FORMATS`, ending with a line break.

    Args:
        where: the path of its JSON, named at the end of what a person reads.
        quiet: of the terminal's format only the verdicts.
        ascii_only: for a terminal that cannot encode the bars.

    Raises:
        ValueError: a value is NaN or infinite; such a number must be counted, not written.
    """
    view = view_of(report, tokens)
    drawings: dict[str, Callable[[], str]] = {
        "json": lambda: dumps(report, indent=1),
        "markdown": lambda: markdown.written(view.blocks(where)),
        "html": view.page,
        "junit": lambda: junit.render(gate_of(report)),
        "sarif": lambda: sarif.render(gate_of(report)),
        "terminal": lambda: view.brief if quiet else printed(
            view.blocks(where), width=view.width, colour=colour, ascii_only=ascii_only
        ),
    }  # fmt: skip
    return drawings[format]().rstrip("\n") + "\n"


def loaded(text: str) -> Finished:
    """A report of any kind from the text of its JSON.

    Raises:
        ValueError: not JSON, or a schema version of another release.
        TypeError: a field is missing or unknown.
    """
    value = json.loads(text)
    plain = value if isinstance(value, dict) else {}
    kind, version = next((KINDS[key] for key in KINDS if key in plain), KINDS["candidates"])
    if plain.get("schema_version") != version:
        raise ValueError(f"schema_version is {plain.get('schema_version')!r}, this release reads {version}")
    found: Finished = from_plain(kind, value)
    return found
