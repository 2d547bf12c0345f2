"""The reports below a folder as a series: each candidate's figures in the order of the audits, and how they changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from parity_audit.audit.baseline import changed_question, name_of, signature
from parity_audit.core.errors import UsageError
from parity_audit.core.report import Report
from parity_audit.report.files import JSON_NAME, read_report


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One candidate of one report.

    `ratio` is its noise ratio over that of the candidate's previous entry. It is None without a previous entry, or if that
    entry asked another question, in which case `same_question` is false. `place` is the folder of the report.
    """

    date: str
    model: str
    candidate: str
    version: str
    verdict: str
    noise_ratio: float | None
    max_abs: float | None
    ratio: float | None
    same_question: bool
    place: str


def history(folder: Path) -> list[Entry]:
    """Return every candidate of every report below a folder, ordered by model and candidate, then by date.

    Raises:
        UsageError: there is no report below the folder, or another release wrote one of them.
    """
    paths = sorted(folder.rglob(JSON_NAME))
    if not paths:
        raise UsageError(f"no {JSON_NAME} below `{folder}`", code="no-reports", where=str(folder.absolute()))
    dated = [(_date(report, path), report, path) for path in paths for report in [read_report(path)]]
    entries: list[Entry] = []
    last: dict[tuple[str, str], tuple[dict[str, Any], Entry]] = {}
    for date, report, path in sorted(dated, key=lambda item: (item[0], str(item[2]))):
        for entry in _entries(date, report, path.parent.relative_to(folder)):
            asked, key = signature(report), (entry.model, entry.candidate)
            before = last.get(key)
            same = before is not None and not changed_question(before[0], asked)
            entries.append(_beside(entry, before[1] if before and same else None, before is not None))
            last[key] = asked, entries[-1]
    return sorted(entries, key=lambda entry: (entry.model.lower(), entry.candidate))


def _entries(date: str, report: Report, place: Path) -> list[Entry]:
    return [
        Entry(
            date=date, model=report.model, candidate=name_of(one), version=one.version, verdict=one.verdict.value,
            noise_ratio=one.logits.noise_ratio if one.logits else None, max_abs=one.logits.max_abs if one.logits else None,
            ratio=None, same_question=True, place=str(place),
        )
        for one in report.candidates
    ]  # fmt: skip


def _beside(entry: Entry, before: Entry | None, there_was_one: bool) -> Entry:
    if before is None:
        return replace(entry, same_question=not there_was_one)
    if not entry.noise_ratio or not before.noise_ratio:
        return entry
    return replace(entry, ratio=entry.noise_ratio / before.noise_ratio)


def _date(report: Report, path: Path) -> str:
    """Return the date that a report states, or, for reports of earlier releases, the time when the file was written."""
    known = report.environment.get("date")
    return (
        str(known)
        if known
        else datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    )
