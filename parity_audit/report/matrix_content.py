"""The table of all cards: what each model and backend came out at, as blocks that every format draws."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import CannotRun
from parity_audit.core.report import Verdict
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, paragraph, styled
from parity_audit.report.numbers import layer_set, ratio, shown

NOT_RUN = "not run"
CANNOT_RUN = "does not run it"
GOOD = (Verdict.EXACT, Verdict.PARITY)
LEGEND = (
    "Each cell is the verdict of one audit and the noise ratio of the logits: their distance to the reference as a multiple "
    "of what rounding alone explains. `-> parity` is the verdict with the patch that the audit wrote."
)


def matrix_content(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> list[Block]:
    """Counts, the table of models by candidates, what is wrong in each cell that is not at parity, and what was not run."""
    if not cards and not not_run:
        return [paragraph("There are no cards yet.")]
    blocks: list[Block] = [styled((headline(cards, not_run), BOLD), level=1), pairs(scope_rows(cards)), SPACE]
    rows, titles = grid(cards, not_run)
    blocks += [columns(["model", *titles], [[model, *cells] for model, cells in rows]), SPACE, paragraph(LEGEND)]
    for title, own in (("What is wrong", wrong_rows(cards)), ("Not run", not_run_rows(not_run))):
        if own:
            blocks += [SPACE, heading(title), pairs(own)]
    return blocks


def wrong_rows(cards: Sequence[Card]) -> list[tuple[str, str]]:
    """Model and candidate of each cell that is not at parity, and why."""
    return [(f"{card.asked.model}, {name_of(card.asked)}", why(card)) for card in cards if card.verdict not in GOOD]


def not_run_rows(not_run: Sequence[Asked]) -> list[tuple[str, str]]:
    """Each model with its candidates that have no card."""
    models = dict.fromkeys(asked.model for asked in not_run)
    return [(model, ", ".join(name_of(asked) for asked in not_run if asked.model == model)) for model in models]


def headline(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> str:
    """`54 cells: 40 parity, 10 mismatch, 4 error; 2 not run`."""
    counts = [(verdict.value, sum(card.verdict is verdict for card in cards)) for verdict in Verdict]
    known = ", ".join(f"{count} {name}" for name, count in counts if count)
    rest = f"; {len(not_run)} not run" if not_run else ""
    return f"{len(cards)} cells: {known or 'none'}{rest}"


def scope_rows(cards: Sequence[Card]) -> list[tuple[str, str]]:
    """What the figures hold for: references, weights, probes, dtypes and dates."""
    facts = {
        "reference": [f"{card.reference.backend} {card.reference.version}" for card in cards if card.reference],
        "weights": [f"synthetic:{card.asked.synthetic}" if card.asked.synthetic else "released" for card in cards],
        "probes": [", ".join(card.asked.probes) or "all" for card in cards],
        "dtype": [f"{card.asked.dtype} on {card.asked.device}" for card in cards],
        "settings": ["diagnosis only, no patches tried" for card in cards if not card.asked.repair],
        "dates": sorted(card.date[:10] for card in cards),
    }
    return [(name, "; ".join(dict.fromkeys(values))) for name, values in facts.items() if values]


def grid(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Rows of (model, one cell per candidate), and the candidates' names; a cell that nobody asked for is empty."""
    filled = {(card.asked.model, name_of(card.asked)): cell(card) for card in cards}
    filled |= {(asked.model, name_of(asked)): NOT_RUN for asked in not_run}
    models = sorted({model for model, _ in filled}, key=str.lower)
    titles = sorted({title for _, title in filled})
    return [(model, [filled.get((model, title), "") for title in titles]) for model in models], titles


def name_of(asked: Asked) -> str:
    """The candidate as it was asked for, and the dtype where it is not float32."""
    return asked.candidate if asked.dtype == "float32" else f"{asked.candidate} {asked.dtype}"


def cell(card: Card) -> str:
    """`mismatch 7.4e+04x -> parity`: the verdict, the agreement figure, and the verdict with the patch."""
    if card.error is not None:
        return CANNOT_RUN if card.error.get("code") == CannotRun.default_code else f"error: {card.error.get('code')}"
    figure = ratio(card.agreement.noise_ratio) if card.agreement else ""
    after = f" -> {card.patched.value}" if card.patched else ""
    return f"{card.verdict.value} {figure}{after}".strip()


def why(card: Card) -> str:
    """The constants that are wrong, or the reason in words where none is named."""
    if card.findings and card.error is None:
        return "; ".join(
            f"{item.knob} {shown(item.candidate_value)}, reference {shown(item.reference_value)}, {layer_set(item.layers)}"
            for item in card.findings
        )
    return card.error["message"] if card.error else card.why
