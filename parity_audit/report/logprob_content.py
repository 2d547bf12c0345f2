"""A log-probability report as blocks that every format draws: verdict, legs, causes, and metrics with their formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.logprob_report import (
    Divergence,
    EngineMode,
    LogprobFinding,
    LogprobReport,
    PairReport,
    TokenRow,
    Verified,
)
from parity_audit.core.report import Verdict
from parity_audit.report.attribution_content import attribution_content
from parity_audit.report.blocks import BAD, BOLD, GOOD, SPACE, UNSURE, Block, columns, heading, pairs, paragraph, styled
from parity_audit.report.numbers import number, ratio

HEADLINE = (
    "abs_dlogp_mean", "rmse_dlogp", "k1_rollout_train", "k3_rollout_train", "abs_dprob_mean", "token_mult_prob_error",
    "ess_token", "pearson_logp",
)  # fmt: skip
"""The metrics in the table of each pair of legs; the JSON has all of them."""
CONTEXT = 24
"""How many characters of context are shown on either side of a token."""
SPARK = "▁▂▃▄▅▆▇█"
STYLES = {Verdict.PARITY: GOOD, Verdict.EXACT: GOOD, Verdict.MISMATCH: BAD}


def headline(report: LogprobReport) -> str:
    """Return the verdict and its reason in one line."""
    return f"{report.verdict.value}: {report.why}"


def logprob_content(report: LogprobReport, *, where: str = "") -> list[Block]:
    """Return the whole report; `where` is the path of logprobs.json, which the last block names."""
    blocks: list[Block] = [
        styled((headline(report), STYLES.get(report.verdict, UNSURE)), level=1),
        SPACE,
        _legs(report),
        *_distances(report),
    ]
    for finding in report.findings:
        blocks += [SPACE, styled((finding.name, BAD), (f"  in {finding.leg}", BOLD), level=3), _finding(finding)]
    for pair in report.pairs:
        title = f"{pair.rollout} against {pair.train}: {pair.tokens} tokens in {pair.sequences} sequences"
        blocks += [SPACE, heading(title), paragraph(pair.meaning), _numbers(pair)]
    if report.modes:
        blocks += [SPACE, heading("Engine settings that were asked for"), _modes(report.modes)]
    if report.attribution is not None:
        blocks += [SPACE, *attribution_content(report.attribution)]
    if report.pairs:
        blocks += [SPACE, heading("What it does to training"), _training(report.pairs[0])]
    for name in report.presets:
        blocks += [SPACE, heading(f"As {name} prints it"), _preset(report, name)]
    blocks += [SPACE, heading("Worst tokens"), _worst(report)] if report.worst else []
    rest = _rest(report)
    blocks += [SPACE, heading("What this run does not say"), pairs(rest)] if rest else []
    return [*blocks, SPACE, paragraph(f"report: {where}")] if where else blocks


def _legs(report: LogprobReport) -> Block:
    rows = [
        (
            leg.name,
            f"{leg.package} {leg.version}",
            leg.dtype,
            number(leg.rmse_to_judge),
            ratio(leg.noise_ratio),
            leg.meaning,
        )
        for leg in report.legs
    ]
    titles = ("leg", "program", "dtype", "RMSE to judge", "ratio", "what its numbers are")
    return columns(titles, rows, right=(3, 4))


def _distances(report: LogprobReport) -> list[Block]:
    """Return a sentence with each tested leg's distance to the judge, compared with that of the trainer.

    The list is empty if the trainer's distance or every other leg's is not known.
    """
    own = next(
        (leg.rmse_to_judge for leg in report.legs if leg.name in ("trainer", "rounding") and leg.noise_ratio == 1.0),
        None,
    )
    told = [leg for leg in report.legs if leg.noise_ratio is not None and leg.rmse_to_judge != own]
    words = "; ".join(
        f"{leg.name} is {number(leg.rmse_to_judge)} nats from the judge, {ratio(leg.noise_ratio)} the trainer's {number(own)}"
        for leg in told
    )
    return [paragraph(f"{words} (limit {ratio(PARITY_RATIO)})", 2)] if words and own is not None else []


def _finding(finding: LogprobFinding) -> Block:
    rows = [("what", finding.message)]
    rows += [
        (name, number(value) if isinstance(value, float) else str(value)) for name, value in finding.evidence.items()
    ]
    rows += [("set", f"{name}={value}") for name, value in finding.settings.items()]
    rows += [] if finding.verified is None else [("with it", _verified(finding.verified))]
    return pairs([*rows, *([("next", finding.hint)] if finding.hint else [])])


def _verified(done: Verified) -> str:
    if done.rmse_after is None:
        return f"not verified: {done.error}"
    moved = f"RMSE to the judge {number(done.rmse_before)} -> {number(done.rmse_after)}"
    return f"{moved}, {ratio(done.ratio)} the trainer's rounding (the engine was run again)"


def _modes(modes: Sequence[EngineMode]) -> Block:
    rows = [
        (mode.name, mode.leg, number(mode.rmse), number(mode.other_rmse), number(mode.moved), mode.gap or mode.proof)
        for mode in modes
    ]
    return columns(
        ("engine", "leg", "RMSE to trainer", "the other way", "largest change", "what the engine says"),
        rows,
        right=(2, 3, 4),
    )


def _numbers(pair: PairReport) -> Block:
    rows = []
    for name in (name for name in HEADLINE if name in pair.metrics):
        low, high = pair.intervals.get(name, (None, None))
        rows.append((name, number(pair.metrics[name]), "" if low is None else f"{number(low)} to {number(high)}"))
    rows += [(f"|d| {name}", number(value), "") for name, value in pair.quantiles.items()]
    rows += [(f"ratios beyond {tau}", f"{share:.3%}", "") for tau, share in pair.extreme_shares.items() if share]
    shape = pair.histogram
    if shape.counts:
        reach = f"tokens with |d| from {number(shape.low)} to {number(shape.high)}, on a log scale; {shape.zeros} equal"
        rows.append(("histogram of |d|", sparkline(shape.counts), reach))
    means = sparkline([group.mean for group in pair.by_probability])
    rows.append(("|d| by probability", means, "unlikely tokens first"))
    return columns(("metric", "value", "95 % interval"), rows, right=(1,))


def _training(pair: PairReport) -> Block:
    effect = pair.training
    return pairs(
        [
            ("tokens with a ratio outside 1 +- 0.2 (clipped)", f"{effect.clipped:.2%}"),
            ("tokens with a ratio above 2 (truncated)", f"{effect.truncated:.2%}"),
            (f"effective sample size of {effect.batch} sequences", f"{effect.ess_per_batch:.4f} of the batch"),
        ]
    )


def _preset(report: LogprobReport, name: str) -> Block:
    rows = [
        (row.key, number(row.value), row.formula, f"ALARM: {row.alarm}" if row.raised else row.alarm)
        for row in report.presets[name]
    ]
    return columns(("key", "value", "formula", "alarm"), rows, right=(1,))


def _worst(report: LogprobReport) -> Block:
    """Return a table of the tokens that differ most, with a column for their context if any of them has a text."""
    told = any(row.text for row in report.worst)
    rows = [
        (
            str(row.sequence),
            str(row.position),
            str(row.token_id),
            number(row.rollout),
            number(row.train),
            number(row.train - row.rollout),
            *((_in_context(row),) if told else ()),
        )
        for row in report.worst
    ]
    titles = ("sequence", "position", "token id", "rollout", "train", "difference", *(("text",) if told else ()))
    return columns(titles, rows, right=range(6))


def _in_context(row: TokenRow) -> str:
    """Return the token between brackets with the text around it; line breaks and other controls are escaped."""
    before, text, after = (json.dumps(part, ensure_ascii=False)[1:-1] for part in (row.before, row.text, row.after))
    return f"{before[-CONTEXT:]}⟦{text}⟧{after[:CONTEXT]}"


def _rest(report: LogprobReport) -> list[tuple[str, str]]:
    rows = [("note", note) for note in report.notes]
    flips = report.flips
    if flips is not None and flips.tokens:
        kinds = f"{flips.ties} ties, {flips.confident} confident (largest margin {number(flips.worst_margin)})"
        rows.append(("another likeliest token", f"{flips.tokens} tokens: {kinds}"))
    if report.divergence is not None:
        rows.append(("greedy decoding", _greedy(report.divergence)))
    return rows + [(f"not tested: {gap.what}", gap.why) for gap in report.not_tested]


def _greedy(found: Divergence) -> str:
    """Return how many greedy completions leave the judge's choice, and the token at which the first of them does."""
    if not found.first:
        return f"all {found.sequences} completions take the judge's likeliest token at every step"
    one = found.first[0]
    ties = sum(other.tie for other in found.first)
    return (
        f"{len(found.first)} of {found.sequences} completions leave the judge's choice ({ties} at a tie); first in sequence "
        f"{one.sequence} at token {one.position}: {one.token_id} for {one.judge_token_id}, margin {number(one.margin)}"
    )


def sparkline(values: Sequence[float]) -> str:
    """Return one bar character per value, on a scale from zero to the largest value."""
    top = max(values, default=0.0)
    if top <= 0.0:
        return SPARK[0] * len(values)
    return "".join(SPARK[min(len(SPARK) - 1, int(len(SPARK) * value / top))] for value in values)
