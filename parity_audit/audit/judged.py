"""Store the results of candidates that were judged, so that an interrupted audit need not judge them again.

A result replaces the tensors of its capture, which are no longer needed. The manifest stays, because a report names the
versions in it. When an audit has judged every candidate, its results are deleted with its captures.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from parity_audit.audit.context import AuditContext
from parity_audit.audit.reference import Reference
from parity_audit.capture.store import RESULTS_ONLY, Capture, open_capture
from parity_audit.core.errors import CaptureBroken
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.report import Candidate
from parity_audit.core.whole_file import write_whole


def question_of(truth: Reference, context: AuditContext) -> str:
    """Return a hash of everything, except the candidate's own capture, that a candidate's result depends on.

    That is the captures of the reference and its judge, the options, the probes, and the source files of this package.
    """
    sides = [capture.folder.name for capture in (truth.capture, truth.judge, truth.definition) if capture is not None]
    asked = [
        context.target, context.repair, context.hooks, context.match_reference, context.limits, context.quick,
        [probe.name for probe in truth.probes],
    ]  # fmt: skip
    return hashlib.sha256(dumps([sides, asked, _program()]).encode()).hexdigest()


def keep_result(result: Candidate, capture: Capture, question: str) -> None:
    """Write a result into its capture's folder and delete the tensors there."""
    write_whole(capture.folder / RESULTS_ONLY, dumps({"question": question, "result": result}))
    for path in capture.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def kept_result(folder: Path, question: str) -> tuple[Candidate, Capture] | None:
    """Return the result stored in a capture's folder, and the capture without its tensors.

    Return None if there is no result, if it was found for another question, or if it cannot be read.
    """
    if not (folder / RESULTS_ONLY).exists():
        return None
    try:
        held = json.loads((folder / RESULTS_ONLY).read_text())
        if held["question"] == question:
            return from_plain(Candidate, held["result"]), open_capture(folder)
    except (OSError, ValueError, TypeError, KeyError, CaptureBroken):
        return None
    return None


def _program() -> list[list[object]]:
    """Return name, size and time of change of every source file: a result is valid only for the program that found it."""
    root = Path(__file__).parents[1]
    found = sorted(root.rglob("*.py"))
    return [[str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns] for path in found]
