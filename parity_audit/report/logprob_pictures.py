"""The pictures of a log-probability report by name, as SVG; its page shows them, and they can be exported."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.logprob_report import LogprobReport, TokenTable
from parity_audit.report.pictures.charts import bins, heat_map, scatter

MOST_CELLS = 20_000
"""The most cells of the heat map; if there are more, only the first sequences are drawn."""


def pictures(report: LogprobReport, tokens: TokenTable) -> dict[str, str]:
    """Return each picture under the name of its file."""
    difference = [abs(b - a) for a, b in zip(tokens.rollout, tokens.train, strict=True)]
    surprise = [[-value for value in side] for side in (tokens.rollout, tokens.train)]
    pair = report.pairs[0]
    sides, size = ("rollout (nats)", "train (nats)"), "|d| in nats: mean, largest"
    return {
        "scatter": scatter("log-probabilities", tokens.rollout, tokens.train, labels=sides),
        "scatter-log": scatter("minus log-probabilities", *surprise, labels=sides, log=True),
        "position": bins("|d| against position", pair.by_position, labels=("position in the completion", size)),
        "probability": bins(
            "|d| against probability", pair.by_probability, labels=("probability of the token", size), x_log=True
        ),
        "heat-map": heat_map(
            "|d| by sequence and position", _grid(tokens, difference), labels=("position", "sequence")
        ),
    }


def _grid(tokens: TokenTable, difference: Sequence[float]) -> list[list[float | None]]:
    """Return the differences as `[sequence][position]`, None after the end of a completion."""
    width = max(tokens.position) + 1
    count = min(max(tokens.sequence) + 1, max(1, MOST_CELLS // width))
    rows: list[list[float | None]] = [[None] * width for _ in range(count)]
    for sequence, position, value in zip(tokens.sequence, tokens.position, difference, strict=True):
        if sequence < count:
            rows[sequence][position] = value
    return rows
