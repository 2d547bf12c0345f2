"""The invariance report as one HTML page: no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

from parity_audit.core.invariance_report import InvarianceReport
from parity_audit.report.invariance_content import headline, invariance_content
from parity_audit.report.page import page, with_title


def render(report: InvarianceReport) -> str:
    """Return the whole page."""
    body = with_title(f"batch invariance of {report.model}", invariance_content(report))
    return page(title=f"{report.model}: {headline(report)}", body=body)
