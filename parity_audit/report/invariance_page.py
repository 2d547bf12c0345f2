"""The invariance report as one HTML page: no script, no request, everything it is given escaped."""

from __future__ import annotations

from parity_audit.core.invariance_report import InvarianceReport
from parity_audit.report.html import STYLE, drawn
from parity_audit.report.html import text_of as text
from parity_audit.report.invariance_content import headline, invariance_content
from parity_audit.report.logprob_page import PAGE_STYLE, POLICY


def render(report: InvarianceReport) -> str:
    """The whole page."""
    body = "".join(drawn(block) for block in invariance_content(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{text(report.model)}: {text(headline(report))}</title><style>{STYLE}{PAGE_STYLE}</style></head>\n"
        f'<body><div class="parity-audit"><p>batch invariance of {text(report.model)}</p>{body}</div></body></html>\n'
    )
