"""What a command was asked, as the question of its cards: every word of it but those that say where the answer goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import Asked, Question
from parity_audit.core.version import __version__

if TYPE_CHECKING:
    from parity_audit.report.views import Finished

FIELDS = frozenset(
    ("model", "candidate", "engine", "reference", "trainer", "miniature", "synthetic", "seed", "dtype", "device", "probe",
     "no_repair")
)  # fmt: skip
"""Options that `Asked` has a field for."""
ELSEWHERE = frozenset(
    ("out", "format", "json", "quiet", "card", "no_install", "timeout", "baseline", "accept_patched", "memory", "exports", "profile")
)  # fmt: skip
"""Options that change nothing of what is found."""


def keep_cards(
    context: typer.Context, report: Finished, question: Question, *, given: list[str] | None, reference: str,
    synthetic: str | None, seed: int, dtype: str, device: str, probes: tuple[str, ...] = (), repair: bool = True,
) -> None:  # fmt: skip
    """Write a card of each candidate into reports/cards, with the question that the command line asked."""
    from parity_audit.matrix.card_from_report import cards_of
    from parity_audit.matrix.cards import CARDS, write_card

    asked = Asked(
        question=question, model=report.model, candidate="", reference=str(parse_backend(reference)), synthetic=synthetic,
        seed=seed, dtype=dtype, device=device, probes=probes, repair=repair, options=tuple(options(context)),
        program=__version__,
    )  # fmt: skip
    for card in cards_of(report, given, asked):
        write_card(card, CARDS)


def options(context: typer.Context) -> Iterator[str]:
    """The further options that were given, as words of the command line."""
    for param in context.command.params:
        name = str(param.name)
        source = context.get_parameter_source(name)
        if name in FIELDS | ELSEWHERE or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            yield max(param.opts if value else param.secondary_opts, key=len)
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                yield from (max(param.opts, key=len), str(one))
