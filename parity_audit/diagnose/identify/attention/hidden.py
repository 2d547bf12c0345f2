"""Scale, soft-cap, ALiBi, sinks, window and mask by synthesis on z, where scores are hidden.

Three steps: (1) slope and cap from the first few queries, which every window sees whole; (2) the window from later
queries; (3) slope and cap again from queries everywhere. Where one slope and cap for all heads leave z unexplained,
or a law of each head by itself (ALiBi, sink) leaves clearly less, that law is taken. Where no causal mask explains the
first queries, other masks are tried: everything, one key ahead, all but the query's own key, and a prefix that sees
itself whole, which leaves late queries alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parity_audit.diagnose.evidence import Evidence, spread
from parity_audit.diagnose.identify.attention.law import Law
from parity_audit.diagnose.identify.attention.rows import Row, with_padding
from parity_audit.diagnose.identify.attention.synthesis import (
    Query,
    fit_synthesis,
    queries_of,
    size_of,
    unexplained,
)
from parity_audit.diagnose.identify.attention.synthesis_heads import Heads, fit_heads, worth_trying
from parity_audit.diagnose.identify.attention.visible import CAP, SCALE, Bend, bend_from_curve, law_of_spec
from parity_audit.diagnose.identify.attention.window import Reach, joined, reach_from_z
from parity_audit.diagnose.thresholds import CLEAR, EXPLAINED

EARLY = (8, 3, 2)
QUERIES = 16
MASKS: dict[str, int | None] = {"not causal": None, "sees one key ahead": 1, "hides the query's own key": -1}
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What synthesis found: the law (None: nothing explains z), the reaches, and the mask in words, if one is seen."""

    bend: Bend | None
    reaches: list[Reach]
    mask: str | None
    why: str = ""


def bend_from_z(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]) -> Hidden:
    """The steps of the module docstring."""
    whole_rows = [row for row in rows if row.z is not None and row.v is not None and row.length > 2]
    # Right padding is behind every causal query; left padding is judged apart, in case it is not masked.
    shown = [row for row in whole_rows if int(row.kept[0]) == 0] or whole_rows
    if not shown:
        return Hidden(bend=None, reaches=[], mask=None, why="v and z are not visible")
    for early in EARLY:
        first = best_bend(evidence, shown, heads, [torch.arange(1, min(early, row.length)) for row in shown], None)
        if first is not None and first.residual <= EXPLAINED:
            found = _causal(evidence, whole_rows, shown, heads, first)
            other = _other_masks(evidence, shown, heads) if found.mask is None else found
            return other if other.mask is not None else found
    return _other_masks(evidence, shown, heads)


def _causal(
    evidence: Evidence, whole_rows: Sequence[Row], shown: Sequence[Row], heads: Sequence[int], first: Bend
) -> Hidden:
    queries = [spread(row.length - 1, QUERIES) + 1 for row in shown]
    # The first queries tell ALiBi and sinks from slope badly: all of them together, windows or not, come first.
    first = _sharper(evidence, shown, heads, queries, None, first)
    pairs = zip(shown, queries, strict=True)
    reaches = [reach for row, at in pairs if (reach := reach_from_z(row, heads, first.law, at)) is not None]
    whole = joined(reaches) if len(reaches) == len(shown) else None
    if whole is None:
        everywhere = first.n > 0 and unexplained(_parts(shown, heads, queries), first.law) <= EXPLAINED
        why = "a causal mask explains the first queries only"
        return Hidden(bend=first, reaches=reaches, mask="causal" if everywhere else None, why=why)
    window = None if whole.high == float("inf") else int(whole.best)
    bend = _sharper(evidence, shown, heads, queries, window, first)
    left_padded = [row for row in whole_rows if int(row.kept[0]) > 0]
    return Hidden(bend=bend, reaches=reaches, mask=padding_fault(evidence, left_padded, heads, bend.law, window))


def _parts(
    rows: Sequence[Row], heads: Sequence[int], queries: Sequence[torch.Tensor], window: int | None = None,
    ahead: int | None = 0,
) -> list[Query]:  # fmt: skip
    pairs = zip(rows, queries, strict=True)
    return [queries_of(row, heads, at, window, ahead=ahead) for row, at in pairs if at.numel()]


def _sharper(
    evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], queries: Sequence[torch.Tensor], window: int | None,
    start: Bend,
) -> Bend:  # fmt: skip
    """The same from more queries, if they can be explained."""
    found = best_bend(evidence, rows, heads, queries, window, start=start)
    return found if found is not None and found.residual <= EXPLAINED else start


def best_bend(
    evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], queries: Sequence[torch.Tensor],
    window: int | None, *, ahead: int | None = 0, start: Bend | None = None,
) -> Bend | None:  # fmt: skip
    """One curve for all heads, or a law of each head where that leaves clearly less; None without queries."""
    parts = _parts(rows, heads, queries, window, ahead)
    found = _best(evidence, parts, len(heads), start) if parts else None
    if found is None:
        return None
    return dataclasses.replace(found, by_spec=unexplained(parts, law_of_spec(evidence, len(heads))))


def _best(evidence: Evidence, parts: Sequence[Query], n_heads: int, start: Bend | None) -> Bend | None:
    if start is not None and start.estimate is None:
        return _free(parts, 0.0, start.law)
    slope = 1.0 / evidence.spec_number(SCALE, evidence.dims["d_head"] ** 0.5)
    cap = evidence.spec_value(CAP)
    caps = [float(cap)] if isinstance(cap, (int, float)) and cap else []
    estimate = fit_synthesis(
        parts, slope, caps, None if start is None or start.estimate is None else start.estimate.value
    )
    curve = None
    if estimate is not None:
        curve = bend_from_curve(estimate, n_heads, estimate.squares**0.5 / size_of(parts), "z")
        # A few queries leave a law of each head too much freedom: it is asked only where nothing else explains them.
        if curve.residual < (ROUNDING if start is not None else EXPLAINED) or not worth_trying(parts, curve.law):
            return curve
    free = _free(parts, slope if estimate is None else float(estimate.value[0]), None)
    if free is not None and (curve is None or free.residual * CLEAR < curve.residual):
        return free
    return curve


def _free(parts: Sequence[Query], slope: float, start: Law | None) -> Bend | None:
    """Each head's own law; sinks only where they leave clearly less."""
    plain = fit_heads(parts, abs(slope), 0.0, start, sinks=False)
    if plain is not None and (plain.residual < ROUNDING or not worth_trying(parts, plain.law)):
        return _bend(plain, with_sinks=False)
    sunk = fit_heads(parts, abs(slope), 0.0, start if plain is None else plain.law, sinks=True)
    chosen = sunk if sunk is not None and (plain is None or sunk.residual * CLEAR < plain.residual) else plain
    return None if chosen is None else _bend(chosen, with_sinks=chosen is sunk)


def _bend(found: Heads, *, with_sinks: bool) -> Bend:
    return Bend(
        law=found.law, estimate=None, slope_stderr=found.slope_stderr, alibi_stderr=found.alibi_stderr,
        residual=found.residual, site="z", n=found.n, sink_stderr=found.sink_stderr if with_sinks else None,
    )  # fmt: skip


def _other_masks(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]) -> Hidden:
    everywhere = [spread(row.length - 1, QUERIES) + 1 for row in rows]
    tries = {word: best_bend(evidence, rows, heads, everywhere, None, ahead=ahead) for word, ahead in MASKS.items()}
    seen = {word: bend for word, bend in tries.items() if bend is not None and bend.residual <= EXPLAINED}
    if seen:
        word = min(seen, key=lambda word: seen[word].residual)
        return Hidden(bend=seen[word], reaches=[], mask=word)
    late = [torch.arange(2 * row.length // 3, row.length) for row in rows]
    last = best_bend(evidence, rows, heads, late, None)
    if last is None or last.residual > EXPLAINED:
        return Hidden(bend=None, reaches=[], mask=None, why="no mask explains z")
    prefix = _prefix(rows, heads, last.law)
    return Hidden(bend=last, reaches=[], mask=prefix or "wrong for the first queries")


def _prefix(rows: Sequence[Row], heads: Sequence[int], law: Law) -> str | None:
    """How many tokens see each other whole, where that explains what a causal mask does not."""
    row = max(rows, key=lambda row: row.length)
    each = [unexplained([queries_of(row, heads, torch.tensor([at]), None)], law) for at in range(1, row.length)]
    wrong = [at + 1 for at, left in enumerate(each) if left > EXPLAINED]
    length = max(wrong, default=0) + 2  # the last token of the prefix sees the same either way
    for size in (length, length - 1):
        cut = torch.arange(min(size, row.length))
        part = queries_of(row, heads, cut, None, ahead=None)
        part = Query(y=part.y[..., :size], v=part.v[:size], z=part.z, visible=part.visible[:, :size],
                     distance=part.distance[:, :size])  # fmt: skip
        if wrong and unexplained([part], law) <= EXPLAINED:
            return f"a prefix of {size} tokens sees itself whole"
    return None


def padding_fault(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], law: Law, window: int | None) -> str:
    """ "causal" when rows with left padding are explained without it; what is wrong otherwise."""
    for row in rows:
        at = torch.arange(1, row.length)
        if unexplained([queries_of(row, heads, at, window)], law) > EXPLAINED:
            whole = with_padding(evidence, row)
            alike = whole.k.shape[1] == row.k.shape[1]  # else k and v were dealt out to the heads
            seen = unexplained([queries_of(whole, heads, row.kept[1:], window)], law) if alike else 1.0
            return "sees padding" if seen <= EXPLAINED else "wrong where a row is left-padded"
    return "causal"
