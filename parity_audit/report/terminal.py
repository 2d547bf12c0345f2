"""The report on a terminal: readable at 80 columns, without colour, and in a pipe."""

from __future__ import annotations

from typing import IO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from parity_audit.core.limits import limit_of
from parity_audit.core.report import Candidate, Patch, Report, Verdict
from parity_audit.report import lines

STYLES = {
    Verdict.EXACT: "bold green",
    Verdict.PARITY: "bold green",
    Verdict.MISMATCH: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.ERROR: "bold yellow",
}


def print_report(report: Report, file: IO[str] | None = None, width: int | None = None) -> None:
    """Render to stdout or `file`."""
    console = Console(file=file, width=width, highlight=False)
    console.print(render(report))


def verdict_lines(report: Report) -> list[str]:
    """One line per candidate; a run that judged nothing says so first."""
    unjudged = [] if any(map(lines.is_judged, report.candidates)) else ["nothing was judged"]
    return unjudged + [lines.verdict_line(candidate) for candidate in report.candidates]


def render(report: Report) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = []
    if not any(map(lines.is_judged, report.candidates)):
        parts.append(Text("nothing was judged", style="bold yellow"))
    parts.append(_header(report))
    for candidate in report.candidates:
        parts += [Rule(style="dim"), *_candidate(candidate)]
    parts += [Rule(style="dim"), *_footer(report)]
    return Group(*parts)


def _header(report: Report) -> RenderableType:
    reference = report.reference
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("model", Text(f"{report.model}  ({report.architecture}, weights {report.weights.get('source')})"))
    if reference is not None:
        grid.add_row(
            "reference", Text(f"{reference.backend} {reference.version}, {reference.dtype} on {reference.device}")
        )
        for note in reference.self_check:
            grid.add_row("", Text(f"! {note}", style="yellow"))
    judge = "the reference in true float64" if report.judge else "none: the noise floor is unknown"
    grid.add_row("judge", judge)
    probes = ", ".join(f"{probe['name']} {'x'.join(map(str, probe['shape']))}" for probe in report.probes)
    grid.add_row("probes", Text(probes))
    return grid


def _candidate(candidate: Candidate) -> list[RenderableType]:
    head = Text(candidate.verdict.value.upper(), style=STYLES[candidate.verdict])
    head.append(f"  {lines.name_of(candidate)}", style="bold")
    parts: list[RenderableType] = [head, Text(candidate.why)]
    if candidate.error:
        parts += [Text(text) for text in _error_lines(candidate.error)]
    parts += [Text(f"! {warning}", style="yellow") for warning in candidate.warnings]
    if candidate.sites:
        parts += [Text(), _table(candidate), Text(lines.logits_line(candidate.logits))]
    if candidate.first_divergence:
        first = candidate.first_divergence
        parts.append(Text(f"first divergence: {first['site']} (probe {first.get('probe')})", style="bold"))
    parts += _findings(candidate)
    parts += _patches(candidate)
    missing = lines.gaps(candidate.not_tested, candidate.not_visible)
    if missing:
        parts += [Text("\nnot tested", style="bold"), *(Text(f"  - {text}") for text in missing)]
    if candidate.detection_limits:
        parts.append(Text("\ndetection limits", style="bold"))
        parts += [Text(f"  {knob}: {limit:.2g}") for knob, limit in candidate.detection_limits.items()]
    return parts


def _error_lines(error: dict[str, object]) -> list[str]:
    return [f"  {key}: {error[key]}" for key in ("where", "expected", "found", "hint") if error.get(key)]


def _table(candidate: Candidate) -> Table:
    """Residual stream by layer; the bar is logarithmic, `|` is the limit of 4x."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("site", no_wrap=True)
    table.add_column("max abs", justify="right", no_wrap=True)
    table.add_column("floor", justify="right", no_wrap=True)
    table.add_column("introduced", justify="right", no_wrap=True)
    table.add_column("1x |4x  to 1e6x", no_wrap=True)
    for delta in lines.table_sites(candidate):
        wrong = delta.noise_ratio is None or delta.noise_ratio > limit_of(delta.site)
        table.add_row(
            delta.site, lines.number(delta.max_abs), lines.ratio(delta.noise_ratio), lines.ratio(delta.introduced_ratio),
            lines.bar(delta.noise_ratio), style="red" if wrong else "",
        )  # fmt: skip
    return table


def _findings(candidate: Candidate) -> list[RenderableType]:
    if not candidate.findings:
        return []
    parts: list[RenderableType] = [Text("\nfindings", style="bold")]
    for finding in candidate.findings:
        head, *rest = lines.finding_lines(finding)
        parts += [Text(f"  {head}", style="bold red"), *(Text(f"  {text}") for text in rest)]
    return parts


def _patches(candidate: Candidate) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for patch in candidate.patches:
        parts += _patch(patch)
    after = lines.patched_line(candidate)
    if after:
        parts += [Text("\nbefore and after", style="bold"), Text(f"  shipped: {candidate.verdict.value}, "
                  f"{lines.logits_line(candidate.logits)}"), Text(f"  {after}")]  # fmt: skip
    return parts


def _patch(patch: Patch) -> list[RenderableType]:
    head = Text(f"\npatch for {', '.join(patch.fixes)}", style="bold")
    code = Syntax(patch.code, "python", theme="ansi_dark", word_wrap=True, background_color="default")
    note = [Text(f"  {patch.note}")] if patch.note else []
    return [head, *note, Padding(code, (0, 0, 0, 4))]


def _footer(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(f"not tested: {gap.what}: {gap.why}") for gap in report.not_tested]
    if any(side.dtype in ("bfloat16", "float16") for side in (report.reference,) if side):
        parts.append(
            Text("half precision cannot prove a port right: errors below its floor are invisible", style="yellow")
        )
    where = report.environment.get("report")
    if where:
        parts.append(Text(f"report: {where}", overflow="fold"))
    parts.append(Text(f"exit code {report.exit_code}, {report.seconds.get('total', 0.0):.0f} s"))
    return parts
