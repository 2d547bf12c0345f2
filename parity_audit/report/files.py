"""The files of a report directory: the report as JSON, Markdown, text and one HTML page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from parity_audit.core.errors import (
    ELSEWHERE,
    EXIT_USAGE,
    Interrupted,
    NotJudged,
    UsageError,
    explained,
    refusals_of_the_disk,
)
from parity_audit.core.logprob_report import TokenTable
from parity_audit.core.report import Report
from parity_audit.core.whole_file import write_whole
from parity_audit.report import json
from parity_audit.report.failure import failed_report
from parity_audit.report.views import FILES, Finished, loaded, rendered, view_of

AUDIT = "report"
"""The name of an audit's files without the ending."""
JSON_NAME = f"{AUDIT}.json"


def write_report(report: Finished, folder: Path, tokens: TokenTable | None = None) -> Path:
    """Write the report to `folder` in every format of `FILES` and return the path of the JSON file.

    Each file is written completely or not at all.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    stem = view_of(report).stem
    name = f"{stem}.json"
    with refusals_of_the_disk("write the report", folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        for ending, format in FILES.items():
            write_whole(folder / f"{stem}{ending}", rendered(report, format, where=name, tokens=tokens))
    return folder / name


def read_report(path: Path) -> Report:
    """Read the report of an earlier audit.

    Raises:
        UsageError: there is no such file, another release wrote it, or it is not the report of an audit.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise _not_a_report(path, error) from error


def read_finished(path: Path) -> Finished:
    """Read the report of an earlier run of any kind: an audit, log-probabilities or invariance.

    Raises:
        UsageError: there is no such file, another release wrote it, or it is not such a report.
    """
    try:
        return loaded(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise _not_a_report(path, error) from error


def _not_a_report(path: Path, error: Exception) -> UsageError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    hint = "give a report.json (or logprobs.json, invariance.json) that this release wrote"
    return UsageError(f"not a report: {why}", code="bad-report", where=str(path), hint=hint)


def set_aside(folder: Path, stem: str = AUDIT) -> None:
    """Rename the report of an earlier run (`report.json` to `previous-report.json`), so that it is not taken for this run's.

    Raises:
        NotJudged: a file cannot be renamed.
    """
    with refusals_of_the_disk("set an earlier report aside", folder, ELSEWHERE):
        for name in (f"{stem}{ending}" for ending in FILES):
            if (folder / name).is_file():
                os.replace(folder / name, folder / f"previous-{name}")


@contextlib.contextmanager
def failure_reported(model: str, folder: Path | None) -> Iterator[None]:
    """Write an error that ends the block to `folder` as the report of the run, then raise it again.

    Nothing is written without a folder, or for a usage error, since a malformed question should leave no files.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        known = explained(error) if isinstance(error, Exception) else Interrupted("interrupted: nothing was judged")
        if folder is not None and known.exit_code != EXIT_USAGE:
            with contextlib.suppress(NotJudged):
                write_report(failed_report(model, known), folder)
        raise
