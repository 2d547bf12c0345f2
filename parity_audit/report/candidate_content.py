"""The part of a report about one candidate, as blocks: layers, first divergence, findings, patches and what was not tested."""

from __future__ import annotations

from collections.abc import Callable

from parity_audit.core.by_layer import layer_set
from parity_audit.core.limits import limit_of
from parity_audit.core.report import Candidate, Finding, Patch, SiteDelta, Verdict
from parity_audit.report.blocks import (
    BAD,
    BOLD,
    DIM,
    SPACE,
    UNSURE,
    Bar,
    Block,
    code,
    columns,
    heading,
    pairs,
    paragraph,
    styled,
)  # fmt: skip
from parity_audit.report.blocks import GOOD as RIGHT
from parity_audit.report.evidence import evidence_lines
from parity_audit.report.numbers import number, ratio, scale_text, shown
from parity_audit.report.rows import (
    before_after,
    introduced,
    is_wrong,
    layer_rows,
    not_tested,
    not_visible,
    own_variation_line,
)
from parity_audit.report.words import (
    DEPARTS,
    GOOD,
    LIMIT_TITLES,
    LIMITS,
    coarse_dtype_warning,
    divergence_line,
    hook_rows,
    limit_rows,
    named_hook_rows,
    proof_rows,
    right_reference_rows,
    settings_text,
    where_found,
)

INTRODUCED_SHOWN = 8
KINDS_WITHOUT_VALUES = (
    "unexplained",
    "weights",
    "hook",
)  # kinds of findings that are shown by their message, not by two values
STYLES = {
    Verdict.EXACT: RIGHT,
    Verdict.PARITY: RIGHT,
    Verdict.MISMATCH: BAD,
    Verdict.INCONCLUSIVE: UNSURE,
    Verdict.ERROR: UNSURE,
}


def style_of(verdict: Verdict) -> str:
    """Return the style in which a verdict is drawn."""
    return STYLES[verdict]


def candidate_content(candidate: Candidate, title: str) -> list[Block]:
    """Return the title of one candidate, then all its sections in reading order."""
    verdict = (f": {candidate.verdict.value}", style_of(candidate.verdict))
    parts: list[Block] = [SPACE, styled(("── ", DIM), (title, BOLD), verdict, level=2)]
    return [*parts, *(block for blocks in sections(candidate, title).values() for block in blocks)]


def sections(candidate: Candidate, title: str) -> dict[str, list[Block]]:
    """Return the blocks of each section by its name, in reading order; a section without content is an empty list."""
    return {name: draw(candidate) for name, draw in SECTIONS.items()} | {"about": _about(candidate, title)}


def _about(candidate: Candidate, title: str) -> list[Block]:
    parts: list[Block] = []
    if candidate.error:
        keys = ("message", "where", "expected", "found", "hint")
        parts.append(pairs([(key, str(candidate.error[key])) for key in keys if candidate.error.get(key)]))
    if settings_text(candidate) and settings_text(candidate) not in title:
        parts.append(pairs([("settings", settings_text(candidate))]))
    return parts


def _layers(candidate: Candidate) -> list[Block]:
    rows = [
        (row.place, row.site, number(row.delta.max_abs), number(row.delta.rel), ratio(row.delta.noise_ratio),
         _bar(row.delta))
        for row in layer_rows(candidate)
    ]  # fmt: skip
    titles = ("part", "worst site", "max abs", "relative", "noise", scale_text())
    return [columns(titles, rows, right=(2, 3, 4))] if rows else []


def _bar(delta: SiteDelta) -> Bar:
    """Return the bar of one site, marked at the site's limit, which is larger inside a block than on the residual stream."""
    return Bar(ratio=delta.noise_ratio, limit=limit_of(delta.site), wrong=is_wrong(delta))


def _own_variation(candidate: Candidate) -> list[Block]:
    line = own_variation_line(candidate)
    return [] if line is None else [SPACE, pairs([("its own runs", line)])]


def _divergence(candidate: Candidate) -> list[Block]:
    line = divergence_line(candidate)
    if line is None:
        return []
    parts: list[Block] = [SPACE, pairs([("first divergence", line)])]
    sites = introduced(candidate)
    if sites:
        shown_sites = [f"{delta.site} {ratio(delta.introduced_ratio)}" for delta in sites[:INTRODUCED_SHOWN]]
        more = f" and {len(sites) - INTRODUCED_SHOWN} more" if len(sites) > INTRODUCED_SHOWN else ""
        parts.append(pairs([("wrong from correct inputs", ", ".join(shown_sites) + more)]))
    return parts


def _findings(candidate: Candidate) -> list[Block]:
    if not candidate.findings:
        return []
    parts: list[Block] = [SPACE, heading(f"Findings: {len(candidate.findings)}")]
    for position, finding in enumerate(candidate.findings, 1):
        parts += _finding(position, finding)
    return parts


def _finding(position: int, finding: Finding) -> list[Block]:
    place = where_found(finding, layer_set(finding.layers))
    title = styled((f"{position}. ", ""), (finding.knob, BOLD), (f"  {place}", ""), level=4)
    values = [("meaning", finding.message)] if finding.kind in KINDS_WITHOUT_VALUES else _values(finding)
    values += [
        ("departs", DEPARTS.get(finding.departs_from_spec, finding.departs_from_spec)),
        ("confidence", f"{finding.confidence:.2f}"),
    ]
    values += [("evidence" if first else "", line) for first, line in _marked(evidence_lines(finding.evidence))]
    return [title, pairs(values, indent=3)]


def _values(finding: Finding) -> list[tuple[str, str]]:
    values = (
        ("reference", finding.reference_value),
        ("candidate", finding.candidate_value),
        ("spec", finding.spec_value),
    )
    return [(side, shown(value)) for side, value in values]


def _marked(lines: list[str]) -> list[tuple[bool, str]]:
    return [(number == 0, line) for number, line in enumerate(lines)]


def _right_reference(candidate: Candidate) -> list[Block]:
    right = candidate.right_reference
    if right is None:
        return []
    return [
        SPACE,
        heading("The reference departs from the spec"),
        pairs(right_reference_rows(right)),
        *code(right.code),
    ]


def _patches(candidate: Candidate) -> list[Block]:
    return [block for patch in candidate.patches for block in _patch(patch)]


def _patch(patch: Patch) -> list[Block]:
    fixes = ", ".join(patch.fixes or (patch.knob,))
    parts: list[Block] = [SPACE, styled(("Patch ", BOLD), (f"for {fixes} in {patch.backend}", ""), level=4)]
    parts += code(patch.code, fold=True)
    if patch.note:
        parts.append(paragraph(patch.note, indent=2))
    if patch.read_back:
        first, more = patch.read_back[0], len(patch.read_back) - 1
        text = f"{first.path}: {shown(first.before)} -> {shown(first.after)}"
        parts.append(pairs([("read back", text + (f" and {more} more alike" if more else ""))]))
    return parts


def _before_after(candidate: Candidate) -> list[Block]:
    if candidate.logits is None and candidate.patched is None:
        return []
    titles, rows = before_after(candidate)
    after = candidate.patched
    if after is None:
        return [SPACE, columns(titles, rows)]
    reached = f"{'reached' if after.target_reached else 'not reached'} (max |difference| <= {number(after.target)})"
    good = "" if after.verdict in GOOD else "; the patched candidate is still not at parity"
    return [SPACE, columns(titles, rows), pairs([("target", reached + good)])]


def _proof(candidate: Candidate) -> list[Block]:
    if not candidate.proof:
        return []
    return [SPACE, heading("Proof on the reference's side"), pairs(proof_rows(candidate.proof))]


def _gaps(candidate: Candidate) -> list[Block]:
    parts: list[Block] = []
    sections = (
        ("Hooks by name", named_hook_rows(candidate)),
        ("Edited hooks", hook_rows(candidate)),
        ("Warnings", [("!", text) for text in candidate.warnings]),
        ("Not visible in this backend", not_visible(candidate)),
        ("Not tested", not_tested(candidate)),
    )
    for title, rows in sections:
        if rows:
            parts += [SPACE, heading(title), pairs(rows)]
    limits, blind = limit_rows(candidate), coarse_dtype_warning(candidate)
    if limits:
        parts += [SPACE, heading(LIMITS), columns(LIMIT_TITLES, limits)]
    return [*parts, paragraph(blind, indent=2)] if blind else parts


SECTIONS: dict[str, Callable[[Candidate], list[Block]]] = {
    "about": lambda _: [],
    "layers": _layers,
    "own variation": _own_variation,
    "divergence": _divergence,
    "findings": _findings,
    "right reference": _right_reference,
    "patches": _patches,
    "before and after": _before_after,
    "proof": _proof,
    "gaps": _gaps,
}
