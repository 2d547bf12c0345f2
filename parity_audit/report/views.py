"""Draw every kind of finished report in every format; stdout and files use the same functions."""

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
"""Widths in characters: the tables of these reports have too many columns for the usual width of 80."""
FILES = {".json": "json", ".md": "markdown", ".txt": "terminal", ".html": "html"}
"""The format of each file in a report directory, by the ending of its name; only the JSON is read again."""
KINDS: dict[str, tuple[type, int]] = {
    "legs": (LogprobReport, LOGPROB_SCHEMA_VERSION),
    "subject": (InvarianceReport, INVARIANCE_SCHEMA_VERSION),
    "candidates": (Report, SCHEMA_VERSION),
}
"""The type and schema version of a report, by a key of its JSON. The first key that is present decides, in this order:
`candidates` is last because other kinds of report have it too."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One finished report, ready to be drawn in any format.

    `stem` is the name of its files without the ending. `brief` has only the headline and the verdicts. `blocks` returns the
    report, given the path that its last line names.
    """

    stem: str
    width: int
    brief: str
    blocks: Callable[[str], list[Block]]
    page: Callable[[], str]


def view_of(report: Finished, tokens: TokenTable | None = None) -> View:
    """Return the view of one report. Without `tokens` the page of a log-probability report has no pictures."""
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
    """Return a report in one of `FORMATS`, with a line break at the end.

    Args:
        where: the path of its JSON, which the last line of the terminal and Markdown formats names.
        quiet: in the terminal format, return only the headline and the verdicts.
        ascii_only: in the terminal format, use ASCII only, for a terminal that cannot encode the bars.

    Raises:
        ValueError: a value is NaN or infinite; a report must count such numbers, not contain them.
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
    """Return the report that the text of a JSON file describes: an audit, log-probabilities or invariance.

    Raises:
        ValueError: the text is not JSON, or has the schema version of another release.
        TypeError: a field is missing or unknown.
    """
    value = json.loads(text)
    plain = value if isinstance(value, dict) else {}
    kind, version = next((KINDS[key] for key in KINDS if key in plain), KINDS["candidates"])
    if plain.get("schema_version") != version:
        raise ValueError(f"schema_version is {plain.get('schema_version')!r}, this release reads {version}")
    found: Finished = from_plain(kind, value)
    return found
