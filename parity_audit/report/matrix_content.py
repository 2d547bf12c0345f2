"""The table of all cards as blocks that every format draws: the verdict of each model with each candidate."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parity_audit.core.by_layer import layer_set
from parity_audit.core.card import Asked, Card, CardFinding, Question
from parity_audit.core.errors import CannotRun
from parity_audit.core.report import Verdict
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, paragraph, styled
from parity_audit.report.numbers import ratio, shown

NOT_RUN = "not run"
CANNOT_RUN = "does not run it"
GOOD = (Verdict.EXACT, Verdict.PARITY)
TITLES = {
    Question.AUDIT: "Same function as the reference",
    Question.LOGPROBS: "Same log-probabilities as the trainer",
    Question.INVARIANCE: "Same answer in every batch",
}
LEGENDS = {
    Question.AUDIT: "Each cell is the verdict of one audit and the noise ratio of the logits: their distance to the reference "
    "as a multiple of what rounding alone explains. `-> parity` is the verdict with the patch that the audit wrote.",
    Question.LOGPROBS: "Each cell is the verdict on the engine's log-probabilities, and their distance to the float64 judge as a "
    "multiple of the trainer's own.",
    Question.INVARIANCE: "Each cell says what the answer depends on (bitwise: nothing; class-only: its last bits, on the shape of "
    "the run; numeric: its last bits, on more; broken: more than those), and its largest change as a multiple of the noise floor.",
}
LONGEST = 300
"""The most characters of an error in the table. Only whole sentences are shown, and always the first; the card has all of it."""


def matrix_content(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> list[Block]:
    """Return the counts, a table of models by candidates per question, the reason for each bad verdict, and what was not run."""
    if not cards and not not_run:
        return [paragraph("There are no cards yet.")]
    blocks: list[Block] = [styled((headline(cards, not_run), BOLD), level=1), pairs(scope_rows(cards)), SPACE]
    for question, own_cards, own_missing in by_question(cards, not_run):
        rows, titles = grid(own_cards, own_missing)
        blocks += [heading(TITLES[question])] if is_mixed(cards, not_run) else []
        blocks += [columns(["model", *titles], [[model, *cells] for model, cells in rows]), SPACE]
        blocks += [paragraph(LEGENDS[question])]
    for title, own in (("What is wrong", wrong_rows(cards)), ("Not run", not_run_rows(not_run))):
        if own:
            blocks += [SPACE, heading(title), pairs(own)]
    return blocks


def by_question(
    cards: Sequence[Card], not_run: Sequence[Asked]
) -> list[tuple[Question, list[Card], list[Asked]]]:  # fmt: skip
    """Return the cards and the cells that were not run, for each question that has any."""
    parts = [
        (
            question, [card for card in cards if card.asked.question is question],
            [asked for asked in not_run if asked.question is question],
        )
        for question in Question
    ]  # fmt: skip
    return [part for part in parts if part[1] or part[2]]


def is_mixed(cards: Sequence[Card], not_run: Sequence[Asked]) -> bool:
    """Return whether there are other questions than audits, so that every table needs a title."""
    return {asked.question for asked in (*(card.asked for card in cards), *not_run)} - {Question.AUDIT} != set()


def wrong_rows(cards: Sequence[Card]) -> list[tuple[str, str]]:
    """Return the model and candidate of each cell that is not at parity, and the reason."""
    return [(_cell_name(card.asked), why(card)) for card in cards if card.verdict not in GOOD]


def _cell_name(asked: Asked) -> str:
    question = [] if asked.question is Question.AUDIT else [asked.question.value]
    return ", ".join((asked.model, name_of(asked), *question))


def not_run_rows(not_run: Sequence[Asked]) -> list[tuple[str, str]]:
    """Return each model with its candidates that were not run."""
    models = dict.fromkeys(asked.model for asked in not_run)
    return [(model, ", ".join(name_of(asked) for asked in not_run if asked.model == model)) for model in models]


def headline(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> str:
    """Return the counts in one line: `54 cells: 40 parity, 10 mismatch, 4 error; 2 not run`."""
    counts = [(verdict.value, sum(card.verdict is verdict for card in cards)) for verdict in Verdict]
    known = ", ".join(f"{count} {name}" for name, count in counts if count)
    rest = f"; {len(not_run)} not run" if not_run else ""
    return f"{len(cards)} cells: {known or 'none'}{rest}"


def scope_rows(cards: Sequence[Card]) -> list[tuple[str, str]]:
    """Return the conditions under which the figures hold: references, weights, probes, dtypes and dates."""
    facts = {
        "reference": [f"{card.reference.backend} {card.reference.version}" for card in cards if card.reference],
        "weights": [f"synthetic:{card.asked.synthetic}" if card.asked.synthetic else "released" for card in cards],
        "probes": [", ".join(card.asked.probes) or "all" for card in cards if card.asked.question is Question.AUDIT],
        "dtype": [f"{card.asked.dtype} on {card.asked.device}" for card in cards],
        "settings": ["diagnosis only, no patches tried" for card in cards if not card.asked.repair],
        "dates": sorted(card.date[:10] for card in cards),
    }
    return [(name, "; ".join(dict.fromkeys(values))) for name, values in facts.items() if values]


def grid(cards: Sequence[Card], not_run: Sequence[Asked] = ()) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return rows of (model, one cell per candidate) and the candidates' names; a cell that was not requested is empty."""
    filled = {(card.asked.model, name_of(card.asked)): cell(card) for card in cards}
    filled |= {(asked.model, name_of(asked)): NOT_RUN for asked in not_run}
    models = sorted({model for model, _ in filled}, key=str.lower)
    titles = sorted({title for _, title in filled})
    return [(model, [filled.get((model, title), "") for title in titles]) for model in models], titles


def name_of(asked: Asked) -> str:
    """Return the candidate's BACKEND string, the dtype unless it is float32, and the other options of its command."""
    dtype = [] if asked.dtype == "float32" else [asked.dtype]
    return " ".join((asked.candidate, *dtype, *asked.options))


def cell(card: Card) -> str:
    """Return a cell's text, `mismatch 7.4e+04x -> parity`: verdict, noise ratio, and verdict with the patch, or the error."""
    if card.error is not None:
        return CANNOT_RUN if card.error.get("code") == CannotRun.default_code else f"error: {card.error.get('code')}"
    after = f" -> {card.patched.value}" if card.patched else ""
    return f"{card.said or card.verdict.value} {figure(card)}{after}".strip()


def figure(card: Card) -> str:
    """Return the noise ratio as text, empty if the card has none."""
    if card.agreement is not None:
        return ratio(card.agreement.noise_ratio)
    return ratio(card.figures["noise_ratio"]) if "noise_ratio" in card.figures else ""


def why(card: Card) -> str:
    """Return the error of a card, or its findings, or, without findings, the reason of its verdict."""
    if card.error is not None:
        return first_sentences(card.error["message"])
    return "; ".join(map(_in_words, card.findings)) or card.why


def _in_words(finding: CardFinding) -> str:
    """Return a finding's message, or both values if it has no message, with its layers."""
    where = layer_set(finding.layers)
    if finding.message:
        return finding.message if finding.layers is None else f"{finding.message}, {where}"
    return f"{finding.knob} {shown(finding.candidate_value)}, reference {shown(finding.reference_value)}, {where}"


def first_sentences(text: str) -> str:
    """Return as many whole sentences as fit into `LONGEST` characters, and at least the first one."""
    kept, *rest = re.split(r"\.\s+", text)
    for sentence in rest:
        if len(kept) + len(sentence) + 2 > LONGEST:
            return f"{kept}. [...]"
        kept = f"{kept}. {sentence}"
    return kept
