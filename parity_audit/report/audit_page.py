"""The report of an audit as one HTML page: the verdicts, then the findings and their repairs, then every number.

The page loads nothing from elsewhere, and all text of the report is escaped. It has everything that the other formats
have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from parity_audit.core.by_layer import layer_set
from parity_audit.core.limits import limit_of
from parity_audit.core.report import Candidate, Finding, Report, SiteDelta, Verdict
from parity_audit.core.sites import LOGITS
from parity_audit.report.blocks import Bar, Block, pairs
from parity_audit.report.candidate_content import KINDS_WITHOUT_VALUES, sections, style_of
from parity_audit.report.content import closing, context, error_blocks
from parity_audit.report.heat import heat_map, key
from parity_audit.report.html import cell_of, drawn, text_of
from parity_audit.report.numbers import number, ratio, shown
from parity_audit.report.page import page
from parity_audit.report.pictures.layers import fitted_by_layer, legend, noise_by_layer, rope_spectrum, score_curve
from parity_audit.report.token_panel import token_panel
from parity_audit.report.words import DEPARTS, GOOD, headline, label, labels, weights_line

SYMBOLS = {
    Verdict.EXACT: "✓", Verdict.PARITY: "✓", Verdict.MISMATCH: "✕", Verdict.INCONCLUSIVE: "?", Verdict.ERROR: "!",
}  # fmt: skip
TITLES = ("candidate", "verdict", "noise at the logits", "max |difference|", "same top token", "findings", "patched")
NOISE_MARKS = {"observed": "after the block", "introduced": "most that one component introduces"}
FIT_MARKS = {"observed": "candidate", "reference": "reference"}


def render(report: Report) -> str:
    """Return the whole page."""
    named = list(zip(labels(report), report.candidates, strict=True))
    parts = [_top(report, named), *(_candidate(name, one) for name, one in named), _scope(report)]
    return page(title=f"{report.model}: {headline(report)}", body="\n".join(parts), copies=True)


def badge(verdict: Verdict, said: str = "") -> str:
    """Return the verdict as a sign and a word, in a colour that repeats it. `said` replaces the word if it is not empty.

    A question other than an audit has its own words, such as `class-only`.
    """
    return f'<span class="badge {style_of(verdict)}">{SYMBOLS[verdict]} {text_of(said or verdict.value)}</span>'


def _top(report: Report, named: list[tuple[str, Candidate]]) -> str:
    about = " · ".join(text for text in (f"parity-audit of {report.model}", report.architecture) if text)
    error = f"<section>{_all(*error_blocks(report.error))}</section>" if report.error else ""
    return (
        f'<header><p class="eyebrow">{text_of(about)}</p><h1>{text_of(headline(report))}</h1>'
        f'<p class="why">{text_of(_against(report))}</p></header>{error}{_summary(named)}'
    )


def _against(report: Report) -> str:
    """Return reference, judge, weights and number of probes in one line; the end of the page has the details."""
    parts = (
        [f"against {label(report.reference)}, {report.reference.dtype} on {report.reference.device}"]
        if report.reference
        else []
    )
    parts += [f"judged in {report.judge.dtype}"] if report.judge else []
    parts += [weights_line(report)] if report.weights else []
    parts += [f"{len(report.probes)} probes"] if report.probes else []
    return " · ".join(parts)


def _summary(named: list[tuple[str, Candidate]]) -> str:
    if not named:
        return ""
    head = "".join(f'<th scope="col">{title}</th>' for title in TITLES)
    rows = "".join(_summary_row(name, one) for name, one in named)
    return (
        '<section aria-label="Verdicts"><table class="summary">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _summary_row(name: str, one: Candidate) -> str:
    logits, after = one.logits, one.patched
    noise = "-"
    if logits is not None:
        own = Bar(ratio=logits.noise_ratio, limit=limit_of(LOGITS), wrong=_over(logits.noise_ratio))
        noise = f"{ratio(logits.noise_ratio)}{cell_of(own)}"
    figures = ("-", "-") if logits is None else (number(logits.max_abs), f"{100 * logits.top1_agreement:.4g} %")
    knobs = ", ".join(dict.fromkeys(finding.knob for finding in one.findings)) or "none"
    patched = (
        f"{badge(after.verdict)} {text_of(number(after.logits.max_abs) if after.logits else '')}" if after else "-"
    )
    cells = [badge(one.verdict), noise, *map(text_of, (*figures, knobs)), patched]
    said = "".join(f'<td data-label="{title}">{cell}</td>' for title, cell in zip(TITLES[1:], cells, strict=True))
    return f'<tr><th scope="row">{text_of(name)}</th>{said}</tr>'


def _over(value: float | None) -> bool:
    return value is None or value > limit_of(LOGITS)


def _candidate(name: str, one: Candidate) -> str:
    own = sections(one, name)
    title = f'<h2>{text_of(name)} {badge(one.verdict)}</h2><p class="why">{text_of(one.why)}</p>'
    mends = _part("What mends it", own, ("right reference", "patches", "before and after", "proof"))
    seen = "".join((_where(one, own["divergence"]), token_panel(one), _charts(one)))
    first = "".join((title, _all(*own["about"]), _findings(one), mends, seen))
    numbers = _part("", own, ("layers", "own variation", "findings", "gaps"))
    is_open = "" if one.verdict in GOOD else " open"
    summary = "<summary>Every number, the evidence, and what was not tested</summary>"
    return f"<section>{first}{f'<details{is_open}>{summary}{numbers}</details>' if numbers else ''}</section>"


def _part(title: str, own: dict[str, list[Block]], names: Iterable[str]) -> str:
    inside = _all(*(block for name in names for block in own[name]))
    return f"<h3>{title}</h3>{inside}" if inside and title else inside


def _all(*blocks: Block) -> str:
    return "".join(drawn(block) for block in blocks)


def _findings(one: Candidate) -> str:
    if not one.findings:
        return ""
    return f'<h3>What is wrong</h3><ol class="cards">{"".join(map(_card, one.findings))}</ol>'


def _card(finding: Finding) -> str:
    """Return the card of one finding: both sides' values and the spec's, or its message; values off the spec are marked."""
    title = f'<span class="knob mono">{text_of(finding.knob)}</span> <span class="dim">{text_of(layer_set(finding.layers))}</span>'
    body = (
        f"<p>{text_of(finding.message)}</p>" if finding.kind in KINDS_WITHOUT_VALUES else f"<dl>{_values(finding)}</dl>"
    )
    about = DEPARTS.get(finding.departs_from_spec, finding.departs_from_spec)
    return f'<li class="card">{title}{body}<p>{text_of(about)}</p></li>'


def _values(finding: Finding) -> str:
    values = {"candidate": finding.candidate_value, "reference": finding.reference_value, "spec": finding.spec_value}
    wrong = ("candidate", "reference") if finding.departs_from_spec == "both" else (finding.departs_from_spec,)
    return "".join(
        f'<dt>{side}</dt><dd class="{"off" if side in wrong else "kept"}">{text_of(shown(value))}</dd>'
        for side, value in values.items()
    )


def _where(one: Candidate, divergence: list[Block]) -> str:
    if not one.sites:
        return ""
    return f'<h3>Where it starts</h3>{_all(*divergence)}<div class="figures">{"".join(_maps(one))}</div>{key()}'


def _maps(one: Candidate) -> list[str]:
    """Return the heat maps of the noise ratio as shipped, introduced by each component, and patched, if measured."""
    first = str((one.first_divergence or {}).get("site", ""))
    maps = [heat_map("As shipped.", "Distance to the reference, in noise floors", one.sites, _noise, first=first)]
    if any(own.introduced_ratio is not None for own in one.sites):
        maps.append(heat_map("Introduced.", "The same, from correct inputs", one.sites, _introduced, first=first))
    if one.patched and one.patched.sites:
        maps.append(heat_map("With the patch.", "All probes run again", one.patched.sites, _noise))
    return maps


def _noise(delta: SiteDelta) -> float | None:
    return delta.noise_ratio


def _introduced(delta: SiteDelta) -> float | None:
    return delta.introduced_ratio


def _charts(one: Candidate) -> str:
    """Return the charts of noise ratios by layer and of the values fitted to activations.

    A finding without values to plot has no chart.
    """
    drawn_fits = (draw(finding) for finding in one.findings for draw in (fitted_by_layer, score_curve, rope_spectrum))
    fits = [picture for picture in dict.fromkeys(drawn_fits) if picture]
    curve = noise_by_layer(one)
    marks = NOISE_MARKS | ({"patched": "after the block, patched"} if one.patched else {})
    figures = [_figure(curve, marks)] if curve else []
    figures += [_figure(picture, FIT_MARKS) for picture in fits]
    return f'<h3>Over the layers</h3><div class="figures">{"".join(figures)}</div>' if figures else ""


def _figure(picture: str, marks: dict[str, str]) -> str:
    return f'<figure class="chart">{picture}{legend(marks)}</figure>'


def _scope(report: Report) -> str:
    facts = report.environment.items()
    rows = [(name.replace("_", " "), value if isinstance(value, str) else json.dumps(value)) for name, value in facts]
    compared = f"<h3>What was compared</h3>{drawn(context(report))}"
    return f"<section><h2>Scope</h2>{compared}{_all(*closing(report, ''))}<h3>Environment</h3>{drawn(pairs(rows))}</section>"
