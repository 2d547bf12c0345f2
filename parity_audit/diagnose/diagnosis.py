"""From a mismatch to findings: replay on own inputs, pick the suspects, fit their constants on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture, wanted
from parity_audit.compare.deltas import Comparison, layer_of
from parity_audit.compare.verdict import share_of_limit
from parity_audit.core.report import Finding
from parity_audit.core.types import NotTested, Probe, SiteTap
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.evidence import evidence_by_layer
from parity_audit.diagnose.findings import unexplained
from parity_audit.diagnose.fitting import identify
from parity_audit.diagnose.localise import introduced_ratios, suspects
from parity_audit.diagnose.numerics import hidden_by_tf32, of_that_size, tf32_finding

DETAIL_SITES = ("q", "k", "v", "rot_q", "rot_k", "z")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, with the introduced ratios that led there."""

    findings: tuple[Finding, ...]
    introduced: dict[tuple[str, str], float]
    not_tested: tuple[NotTested, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate against its reference: sessions to ask, captures to read, and a place for new ones."""

    candidate: Session
    reference: Session
    candidate_capture: Capture
    reference_capture: Capture
    comparison: Comparison
    probes: tuple[Probe, ...]
    dtype: str
    out: Path


def diagnose(case: Case) -> Diagnosis:
    """Localise, then identify. Where TF32 alone explains the size of the difference, nothing else is searched for:
    the repair switches it off and looks again.

    Probes with every site are replayed as they are. Only when they show nothing is a probe that captures the
    residual stream alone (it is long, so this is dear) run once more with the attention's inputs and outputs:
    what the short probes explain is repaired first, and what only length shows is left for the next round.
    """
    coarse = tf32_finding(
        case.candidate.description(), case.reference.description(), case.comparison.sites,
        device=case.candidate.plan.device, dtype=case.dtype,
    )  # fmt: skip
    if coarse is not None and of_that_size(case.comparison.sites):
        return Diagnosis(findings=(coarse,), introduced={}, not_tested=(hidden_by_tf32(),))
    gaps: list[NotTested] = []
    wide = tuple(probe for probe in case.probes if probe.sites == "all")
    candidate, reference, ratios = _replay(case, wide, case.candidate_capture, case.reference_capture, "replay")
    pairs = [(candidate, reference)]
    for probe in [] if suspects(ratios) else _diverging_long_probes(case):
        layers = _layers_to_detail(case.comparison, probe)
        pairs.append(_detail(case, probe, layers, ratios))
    found = suspects(ratios)
    plan = case.reference.plan
    layers_seen = evidence_by_layer("candidate", [pair[0] for pair in pairs], plan, case.candidate_capture)
    reference_seen = evidence_by_layer("reference", [pair[1] for pair in pairs], plan, case.reference_capture)
    findings, missing = identify(layers_seen, reference_seen, set(found))
    gaps += missing
    findings = [*([coarse] if coarse else []), *findings, *unexplained(found, findings)]
    return Diagnosis(findings=tuple(findings), introduced=ratios, not_tested=tuple(gaps))


def _replay(
    case: Case, probes: Sequence[Probe], candidate: Capture, reference: Capture, name: str, choose: object = wanted
) -> tuple[Capture, Capture, dict[tuple[str, str], float]]:
    """The judge on each side's own inputs, and the introduced ratios that follow."""
    forced = [
        take_capture(
            case.reference, probes, case.out / f"{name}-{side}", precision=FLOAT64, forced_by=own,
            choose=choose,  # type: ignore[arg-type]
        )
        for side, own in (("candidate", candidate), ("reference", reference))
    ]  # fmt: skip
    ratios = introduced_ratios(candidate, forced[0], reference, forced[1], dtype=case.dtype)
    return candidate, reference, ratios


def _diverging_long_probes(case: Case) -> list[Probe]:
    """Long probes that the floor does not explain."""
    wrong = {delta.probe for delta in case.comparison.by_probe if share_of_limit(delta) > 1.0}
    return [probe for probe in case.probes if probe.sites != "all" and probe.name in wrong]


def _layers_to_detail(comparison: Comparison, probe: Probe) -> set[int]:
    """Every layer with a diverging site on this probe; errors are inherited, so later layers come along."""
    wrong = [delta for delta in comparison.by_probe if delta.probe == probe.name and share_of_limit(delta) > 1.0]
    return {layer for delta in wrong if (layer := layer_of(delta.site)) is not None}


def _detail(
    case: Case, probe: Probe, layers: set[int], ratios: dict[tuple[str, str], float]
) -> tuple[Capture, Capture]:
    """Capture the attention of these layers on a long probe, on both sides, and replay it."""

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return wanted(tap, probe) or (layer_of(tap.site) in layers and tap.site.split(".", 2)[2] in DETAIL_SITES)

    own = [
        take_capture(session, [probe], case.out / f"detail-{side}-{probe.name}", choose=choose)
        for side, session in (("candidate", case.candidate), ("reference", case.reference))
    ]
    candidate, reference, found = _replay(case, [probe], own[0], own[1], f"replay-{probe.name}", choose)
    ratios.update(found)
    return candidate, reference
