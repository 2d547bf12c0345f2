"""The log-prob report as one HTML page with pictures: no script, no request, everything it is given escaped."""

from __future__ import annotations

from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.report.blocks import Block, columns, heading
from parity_audit.report.html import STYLE, drawn
from parity_audit.report.html import text_of as text
from parity_audit.report.logprob_content import headline, logprob_content
from parity_audit.report.logprob_pictures import pictures
from parity_audit.report.numbers import number
from parity_audit.report.pictures.export import CHART_STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs, whatever a model or a token is called."""
PAGE_STYLE = """
body { background: #fff; color: #1c1c1e; margin: 2em } .parity-audit { max-width: 76em; margin: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22em, 1fr)); gap: 1em }
svg { width: 100%; height: auto }
"""
LONGEST_SHOWN = 200
"""Tokens of the longest completion that its table shows."""


def render(report: LogprobReport, tokens: TokenTable) -> str:
    """The whole page."""
    blocks = logprob_content(report)
    top = "".join(drawn(block) for block in blocks[:1])
    rest = "".join(drawn(block) for block in [*blocks[1:], *_longest(tokens)])
    charts = "\n".join(f"<div>{picture}</div>" for picture in pictures(report, tokens).values())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{text(report.model)}: {text(headline(report))}</title><style>{STYLE}{PAGE_STYLE}{CHART_STYLE}</style></head>\n"
        f'<body><div class="parity-audit"><p>log-probabilities of {text(report.model)}</p>{top}\n'
        f'<div class="charts">\n{charts}\n</div>{rest}</div></body></html>\n'
    )


def _longest(tokens: TokenTable) -> list[Block]:
    sequence = tokens.sequence[max(range(len(tokens.position)), key=tokens.position.__getitem__)]
    own = zip(tokens.sequence, tokens.position, tokens.token_id, tokens.rollout, tokens.train, strict=True)
    rows = [
        (str(position), str(token), number(a), number(b), number(b - a))
        for at, position, token, a, b in own
        if at == sequence
    ]
    titles = ("position", "token id", "rollout", "train", "difference")
    return [
        heading(f"Longest completion: sequence {sequence}, {len(rows)} tokens"),
        columns(titles, rows[:LONGEST_SHOWN], right=range(len(titles))),
    ]
