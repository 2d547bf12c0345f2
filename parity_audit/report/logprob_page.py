"""The log-probability report as one HTML page with pictures: no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.report.blocks import Block, columns, heading
from parity_audit.report.logprob_content import headline, logprob_content
from parity_audit.report.logprob_pictures import pictures
from parity_audit.report.numbers import number
from parity_audit.report.page import page, with_title

LONGEST_SHOWN = 200
"""How many tokens of the longest completion are shown in its table."""


def render(report: LogprobReport, tokens: TokenTable | None) -> str:
    """Return the whole page. `tokens` are stored in a separate file; without them the page has no pictures."""
    blocks = [*logprob_content(report), *(_longest(tokens) if tokens else ())]
    drawn = pictures(report, tokens).values() if tokens else ()
    charts = "\n".join(f"<div>{picture}</div>" for picture in drawn)
    figures = f'<div class="charts">\n{charts}\n</div>' if charts else ""
    body = with_title(f"log-probabilities of {report.model}", blocks, figures)
    return page(title=f"{report.model}: {headline(report)}", body=body)


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
