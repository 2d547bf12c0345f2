"""The attribution of a log-probability mismatch as blocks: a summary, the growing set of switches, each switch alone."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.logprob_report import Attribution, SwitchEffect
from parity_audit.report.blocks import BOLD, SPACE, Block, columns, heading, pairs, paragraph, styled
from parity_audit.report.numbers import number

TITLES = ("switch", "side", "of the squared error", "95 % interval", "RMSE left")


def attribution_content(found: Attribution) -> list[Block]:
    """Return the section about one attribution."""
    blocks: list[Block] = [
        heading(f"Where the mismatch of {found.leg} and trainer comes from"),
        styled((sentence(found), BOLD)),
        paragraph(f"{found.tokens} tokens, RMSE {number(found.rmse)} nats; a share is 1 - sum d'^2 / sum d^2"),
    ]
    if found.together:
        blocks += [SPACE, paragraph("Best first, each with those above it:"), _table(found.together)]
    every = (*found.alone, *([found.control] if found.control else []))
    if found.alone:
        blocks += [SPACE, paragraph("Each alone:"), _table([effect for effect in every if effect.moves])]
    rows = [("write", f"{key}={value}") for effect in found.proposed for key, value in effect.settings.items()]
    still = [_name(effect) for effect in every if not effect.moves]
    rows += [("changes no number", ", ".join(still))] if still else []
    rows += [(f"not tested: {gap.what}", gap.why) for gap in found.not_tested]
    return [*blocks, SPACE, pairs(rows)] if rows else blocks


def sentence(found: Attribution) -> str:
    """Return the result in one line, such as "head in float32 (trainer): 61 % of the squared error; with eager attention: 84 %"."""
    if not found.rmse:
        return "there is no mismatch to explain: every log-probability is equal"
    if not found.proposed:
        reason = "the target is met without any" if found.reached else "no switch explains any of it beyond chance"
        return f"no switch is needed or helps: {reason}" if found.reached else reason
    if not found.together or len(found.proposed) == 1:
        parts = f"{_name(found.proposed[0])}: {found.share:.1%} of the squared error"
    else:
        first = found.proposed[0]
        rest = ", ".join(_name(effect) for effect in found.proposed[1:])
        parts = f"{_name(first)}: {first.share:.1%} of the squared error; with {rest}: {found.share:.1%}"
    inside = f" ({_interval(found)})" if found.interval else ""
    outcome = "reaches" if found.reached else "does not reach"
    return f"{parts}{inside}, which {outcome} the target ({found.target}): RMSE {number(found.rmse)} -> {number(found.rmse_left)}"


def _table(effects: Sequence[SwitchEffect]) -> Block:
    rows = [(one.name, one.leg, f"{one.share:.1%}", _interval(one), number(one.rmse)) for one in effects]
    return columns(TITLES, rows, right=(2, 4))


def _name(effect: SwitchEffect) -> str:
    return f"{effect.name} ({effect.leg})"


def _interval(of: SwitchEffect | Attribution) -> str:
    return "" if of.interval is None else f"{of.interval[0]:.1%} to {of.interval[1]:.1%}"
