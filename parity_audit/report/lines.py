"""What every report says, as plain text: values, verdicts, layers. Terminal and Markdown share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.report import Candidate, Finding, LogitsDelta, SiteDelta, Verdict
from parity_audit.core.types import NotTested, NotVisible

BAR_WIDTH = 20
BAR_DECADES = 6.0


def name_of(candidate: Candidate) -> str:
    """Backend, release and the settings the user gave."""
    return f"{candidate.backend} {candidate.version}".strip()


def value_text(value: Any) -> str:
    """A knob's value for reading; the report keeps all digits."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, (int, float, dict)):
        return str(value)
    if isinstance(value, dict):
        inner = value.get("by_layer", value)
        return ", ".join(f"{key}: {value_text(item)}" for key, item in inner.items())
    return f"{value:.6g}"


def number(value: float | None) -> str:
    """A distance in three digits."""
    return "-" if value is None else f"{value:.2e}"


def ratio(value: float | None) -> str:
    """A multiple of the noise floor."""
    if value is None:
        return "-"
    return f"{value:.1f}x" if value < 1000 else f"{value:.1e}x"


def bar(value: float | None) -> str:
    """Noise ratio on a logarithmic scale, six decades wide; the limit of 4 is the `|`."""
    limit = round(BAR_WIDTH * math.log10(PARITY_RATIO) / BAR_DECADES)
    filled = 0 if not value or value <= 1 else min(BAR_WIDTH, math.ceil(BAR_WIDTH * math.log10(value) / BAR_DECADES))
    cells = ["#" if cell < filled else "." for cell in range(BAR_WIDTH)]
    cells.insert(limit, "|")
    return "".join(cells)


def layers_text(layers: Sequence[int] | None) -> str:
    """Which layers a finding is about."""
    return (
        "all layers"
        if layers is None
        else f"layer {layers[0]}"
        if len(layers) == 1
        else f"layers {', '.join(map(str, layers))}"
    )


def table_sites(candidate: Candidate) -> list[SiteDelta]:
    """The rows of the layer table: the residual stream and the logits, and the first divergence wherever it is."""
    first = (candidate.first_divergence or {}).get("site")
    wanted = ("resid_post",)
    rows = [
        delta for delta in candidate.sites
        if delta.layer is None or delta.site.endswith(wanted) or delta.site == first
    ]  # fmt: skip
    if len(rows) <= 40:
        return rows
    return [delta for delta in rows if delta.layer is None or delta.site == first or delta.layer % 2 == 0]


def finding_lines(finding: Finding) -> list[str]:
    """A finding: what, where, both values, who departs from the spec, how sure."""
    head = f"{finding.knob}  ({finding.kind}, {layers_text(finding.layers)}, first at {finding.site})"
    if finding.kind in ("unexplained", "weights"):
        return [head, f"  {finding.message}"]
    lines = [
        head,
        f"  reference {value_text(finding.reference_value)}",
        f"  candidate {value_text(finding.candidate_value)}   spec {value_text(finding.spec_value)}",
        f"  departs from the spec: {finding.departs_from_spec}; confidence {finding.confidence:.2f}",
    ]
    tied = finding.evidence.get("tied_with")
    return [*lines, f"  fits equally well: {', '.join(map(str, tied))}"] if tied else lines


def logits_line(logits: LogitsDelta | None) -> str:
    """The distance at the logits in one line."""
    if logits is None:
        return "logits not compared"
    return (
        f"logits max {number(logits.max_abs)}  rmse {number(logits.rmse)}  floor {ratio(logits.noise_ratio)}  "
        f"KL {number(logits.kl)}  top-1 {logits.top1_agreement:.2%}"
    )


def verdict_line(candidate: Candidate) -> str:
    """Verdict first, then why."""
    return f"{candidate.verdict.value.upper():12s} {name_of(candidate)}: {candidate.why}"


def patched_line(candidate: Candidate) -> str:
    """What the patches achieve."""
    patched = candidate.patched
    if patched is None or patched.logits is None:
        return ""
    reached = "reached" if patched.target_reached else "not reached"
    return f"patched: {patched.verdict.value}, {logits_line(patched.logits)}; target {patched.target:g} {reached}"


def gaps(not_tested: Sequence[NotTested], not_visible: Sequence[NotVisible]) -> list[str]:
    """What this run did not look at, sites of all layers folded into one line each."""
    folded: dict[tuple[str, str], int] = {}
    for item in not_visible:
        site = ".".join(["blocks.*", *item.site.split(".")[2:]]) if item.site.startswith("blocks.") else item.site
        folded[site, item.why] = folded.get((site, item.why), 0) + 1
    return [f"{item.what}: {item.why}" for item in not_tested] + [
        f"{site} not visible: {why}" for (site, why) in folded
    ]


def is_judged(candidate: Candidate) -> bool:
    """Whether anything is claimed about this candidate."""
    return candidate.verdict not in (Verdict.ERROR, Verdict.INCONCLUSIVE)
