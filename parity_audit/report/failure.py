"""The report of an audit that ended in an error, so that `--json` prints the same structure in every case."""

from __future__ import annotations

from parity_audit.core.errors import ParityError
from parity_audit.core.report import Report
from parity_audit.report.environment import this_machine


def failed_report(model: str, error: ParityError) -> Report:
    """Return the report of a run that ended in `error` before any candidate was judged."""
    return Report(
        model=model, architecture="", spec="", weights={}, reference=None, judge=None, probes=(), candidates=(),
        environment=this_machine(), seconds={}, exit_code=error.exit_code, error=error.to_json(),
    )  # fmt: skip
