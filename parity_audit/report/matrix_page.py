"""The table of all cards as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.card import Asked, Card, Question
from parity_audit.report.audit_page import SYMBOLS, badge
from parity_audit.report.blocks import pairs
from parity_audit.report.html import drawn, text_of
from parity_audit.report.matrix_content import (
    CANNOT_RUN,
    LEGENDS,
    NOT_RUN,
    TITLES,
    by_question,
    cell,
    figure,
    headline,
    is_mixed,
    name_of,
    not_run_rows,
    scope_rows,
    wrong_rows,
)
from parity_audit.report.page import page


def render(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> str:
    """Return the whole page."""
    title = headline(cards, not_run)
    parts = [
        f'<header><p class="eyebrow">parity-audit matrix</p><h1>{text_of(title)}</h1></header>',
        *(_table(*part, titled=is_mixed(cards, not_run)) for part in by_question(cards, not_run)),
        _section("What is wrong", wrong_rows(cards)),
        _section("Not run", not_run_rows(not_run)),
        _section("What the figures hold for", scope_rows(cards)),
    ]
    return page(title=title, body="\n".join(parts))


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"<section><h2>{title}</h2>{drawn(pairs(rows))}</section>" if rows else ""


def _table(question: Question, cards: Sequence[Card], not_run: Sequence[Asked], *, titled: bool) -> str:
    """Return the section of one question: its title if `titled`, the grid, and how to read a cell."""
    title = f"<h2>{text_of(TITLES[question])}</h2>" if titled else ""
    return f'<section>{title}{_grid(cards, not_run)}<p class="why">{text_of(LEGENDS[question])}</p></section>'


def _grid(cards: Sequence[Card], not_run: Sequence[Asked]) -> str:
    cells = {(card.asked.model, name_of(card.asked)): _cell(card) for card in cards}
    missing = {(asked.model, name_of(asked)): f'<span class="dim">{NOT_RUN}</span>' for asked in not_run}
    filled = {**missing, **cells}
    titles = sorted({title for _, title in filled})
    head = "".join(f'<th scope="col">{text_of(title)}</th>' for title in ("model", *titles))
    rows = "".join(
        f'<tr><th scope="row">{text_of(model)}</th>'
        + "".join(f"<td>{filled.get((model, title), '')}</td>" for title in titles)
        + "</tr>"
        for model in sorted({model for model, _ in filled}, key=str.lower)
    )
    return (
        '<div class="scroll" role="region" tabindex="0" aria-label="models by candidates"><table class="matrix">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(card: Card) -> str:
    """Return the verdict with its sign, the noise ratio, and the verdict with the patch; or the error of the card."""
    if card.error is not None:
        text = cell(card)
        return f'<span class="{"dim" if text == CANNOT_RUN else "unsure"}">{text_of(text)}</span>'
    after = f" {SYMBOLS[card.patched]} {card.patched.value} with the patch" if card.patched else ""
    return f"{badge(card.verdict, card.said)} {text_of(figure(card))}{after}"
