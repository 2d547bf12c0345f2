"""Findings as a pandas DataFrame, one row each, for further work in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parity_audit.core.errors import UsageError
from parity_audit.core.report import Candidate, Finding, Report
from parity_audit.report.words import labels

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "candidate", "verdict", "knob", "kind", "layers", "site", "reference_value", "candidate_value", "spec_value",
    "departs_from_spec", "confidence", "patched", "message",
)  # fmt: skip
"""The columns. `patched`: whether the candidate was run with its patches and one of them fixes the finding's knob. The other
columns have the values of report.json."""


def findings_frame(report: Report) -> pd.DataFrame:
    """Return one row per finding of every candidate, in the order of the report; without findings, an empty table.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError("findings_frame needs pandas", code="no-pandas", hint="pip install pandas") from error
    rows = [
        _row(one, name, finding)
        for one, name in zip(report.candidates, labels(report), strict=True)
        for finding in one.findings
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(candidate: Candidate, name: str, finding: Finding) -> dict[str, Any]:
    repaired = {knob for patch in candidate.patches for knob in patch.fixes}
    return {
        "candidate": name,
        "verdict": candidate.verdict.value,
        "patched": candidate.patched is not None and finding.knob in repaired,
        **{key: getattr(finding, key) for key in COLUMNS if hasattr(finding, key)},
    }
