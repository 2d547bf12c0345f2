"""The log-prob report as one HTML page with pictures: no script, no request, everything it is given escaped."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.report.blocks import Block, columns, heading
from parity_audit.report.html import STYLE, drawn
from parity_audit.report.html import text_of as text
from parity_audit.report.logprob_content import headline, logprob_content
from parity_audit.report.numbers import number
from parity_audit.report.pictures.charts import bins, heat_map, scatter

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs, whatever a model or a token is called."""
PAGE_STYLE = """
body { background: #fff; color: #1c1c1e; margin: 2em } .parity-audit { max-width: 76em; margin: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22em, 1fr)); gap: 1em }
svg { width: 100%; height: auto } svg text { font: 9px system-ui, sans-serif; fill: #555; text-anchor: middle }
svg .title { font-size: 11px; fill: #111 } svg .end { text-anchor: end } .frame { fill: none; stroke: #bbb }
.point { fill: #2456a6; fill-opacity: .45 } .line { fill: none; stroke: #b3261e } .bin { fill: #c5d3ea }
.extreme { fill: none; stroke: #2456a6 }
"""
LONGEST_SHOWN = 200
"""Tokens of the longest completion that its table shows."""
MOST_CELLS = 20_000
"""Cells of the heat map; of more sequences the first are drawn."""


def render(report: LogprobReport, tokens: TokenTable) -> str:
    """The whole page."""
    blocks = logprob_content(report)
    top = "".join(drawn(block) for block in blocks[:1])
    rest = "".join(drawn(block) for block in [*blocks[1:], *_longest(tokens)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{text(report.model)}: {text(headline(report))}</title><style>{STYLE}{PAGE_STYLE}</style></head>\n"
        f'<body><div class="parity-audit"><p>log-probabilities of {text(report.model)}</p>{top}\n'
        f'<div class="charts">\n{_pictures(report, tokens)}\n</div>{rest}</div></body></html>\n'
    )


def _pictures(report: LogprobReport, tokens: TokenTable) -> str:
    difference = [abs(b - a) for a, b in zip(tokens.rollout, tokens.train, strict=True)]
    surprise = [[-value for value in side] for side in (tokens.rollout, tokens.train)]
    pair = report.pairs[0]
    size = "|d| in nats: mean, largest"
    charts = [
        scatter("log-probabilities", tokens.rollout, tokens.train, labels=("rollout (nats)", "train (nats)")),
        scatter("minus log-probabilities", *surprise, labels=("rollout (nats)", "train (nats)"), log=True),
        bins("|d| against position", pair.by_position, labels=("position in the completion", size)),
        bins("|d| against probability", pair.by_probability, labels=("probability of the token", size), x_log=True),
        heat_map("|d| by sequence and position", _grid(tokens, difference), labels=("position", "sequence")),
    ]
    return "\n".join(f"<div>{one}</div>" for one in charts)


def _grid(tokens: TokenTable, difference: Sequence[float]) -> list[list[float | None]]:
    """`[sequence][position]`, None where a completion has ended."""
    width = max(tokens.position) + 1
    count = min(max(tokens.sequence) + 1, max(1, MOST_CELLS // width))
    rows: list[list[float | None]] = [[None] * width for _ in range(count)]
    for sequence, position, value in zip(tokens.sequence, tokens.position, difference, strict=True):
        if sequence < count:
            rows[sequence][position] = value
    return rows


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
