"""What the auditor said of a planted fault, against the truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity_audit.core.report import Candidate, Finding, Verdict
from parity_audit.core.sites import local_name
from parity_audit.core.types import KnobValue
from parity_audit.repair.choose import A_PATCH
from parity_audit.selftest.corpus import Fault

VALUE_WITHIN = 0.01
NOTHING = 1e-4
WRONG = (Verdict.MISMATCH,)
NAMED, LISTED, MISSED = "named", "listed as unexplained", "missed"
REPAIRED = (Verdict.PARITY, Verdict.EXACT)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One fault. None where the question does not apply."""

    id: str
    model: str
    verdict: str
    detected: bool
    placed: bool | None = None
    named: bool | None = None
    layers: bool | None = None
    valued: bool | None = None
    extent: bool | None = None
    repaired: bool | None = None
    recognised: bool | None = None
    parts: tuple[str, ...] = ()
    false_alarms: tuple[str, ...] = ()
    confidence: float = 0.0
    first_site: str = ""
    found: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0


def score(fault: Fault, candidate: Candidate) -> Score:
    """Compare one candidate's findings with what was planted in it."""
    named = [finding for finding in candidate.findings if finding.kind != "unexplained"]
    named.sort(key=lambda finding: finding.knob not in fault.knobs)  # the very name first, other true names after it
    right = _matched(named, fault)
    hits = [finding for finding in right if finding is not None]
    first = str((candidate.first_divergence or {}).get("site", ""))
    wrong = [finding for finding in named if not any(_is(finding, knob, fault) for knob in fault.knobs)]
    single = hits[0] if len(fault.knobs) == 1 and hits else None
    return Score(
        id=fault.id, model=fault.model, verdict=candidate.verdict.value,
        detected=(candidate.verdict in WRONG) != fault.harmless,
        placed=None if fault.site is None or fault.harmless else first == fault.site,
        named=None if fault.harmless else len(hits) == len(right),
        layers=None if fault.layers is None or single is None else _all_layers(named, fault) == fault.layers,
        valued=None if fault.value is None or fault.harmless else single is not None and _close(single.candidate_value, fault.value),
        extent=None if fault.extent is None else any(fault.extent in str(item.evidence.get("extent", "")) for item in hits),
        repaired=_repaired(candidate, fault), recognised=_recognised(candidate, fault),
        parts=_parts(right, candidate.findings, fault),
        false_alarms=tuple(_words(finding) for finding in (named if fault.harmless else wrong)),
        confidence=max((finding.confidence for finding in hits), default=0.0), first_site=first,
        found=tuple(_words(finding) for finding in candidate.findings),
        error=str((candidate.error or {}).get("message", "")),
    )  # fmt: skip


def not_judged(fault: Fault, error: str) -> Score:
    """The score of a fault whose audit said nothing: missed, and no clean port is counted as right."""
    asked = None if fault.harmless else False
    return Score(
        id=fault.id, model=fault.model, verdict=Verdict.ERROR.value, detected=False, named=asked,
        parts=tuple(MISSED for _ in fault.sites), error=error,
    )  # fmt: skip


def _matched(named: Sequence[Finding], fault: Fault) -> list[Finding | None]:
    """The finding of each part of a fault, in the order of `fault.knobs`; a finding counts for one part alone.

    Exact names are given out first, so that a name that would count for several parts (`any_knob`) takes none of them.
    """
    found: dict[int, Finding] = {}
    for counts in (_is_exactly, _is):
        for part, knob in enumerate(fault.knobs):
            free = [item for item in named if all(item is not taken for taken in found.values())]
            match = next((item for item in free if counts(item, knob, fault)), None)
            if part not in found and match is not None:
                found[part] = match
    return [found.get(part) for part in range(len(fault.knobs))]


def _parts(right: Sequence[Finding | None], findings: Sequence[Finding], fault: Fault) -> tuple[str, ...]:
    """What became of each part of a stacked fault: named, its site listed as unexplained, or missed."""
    open_sites = {local_name(finding.site) for finding in findings if finding.kind == "unexplained"}
    said = [
        NAMED if found is not None else LISTED if site in open_sites else MISSED
        for found, site in zip(right, fault.sites, strict=False)
    ]
    return tuple(said)


def _all_layers(found: Iterable[Finding], fault: Fault) -> list[int]:
    """The layers of every finding that names the fault: a value that changes with the layer makes several."""
    right = [finding for finding in found if any(_is(finding, knob, fault) for knob in fault.knobs)]
    return sorted({layer for finding in right for layer in finding.layers or ()})


def _is_exactly(finding: Finding, knob: str, fault: Fault) -> bool:
    return finding.knob == knob


def _is(finding: Finding, knob: str, fault: Fault) -> bool:
    return finding.knob == knob or finding.knob.startswith(tuple(fault.any_knob) or ("\0",))


def _close(found: KnobValue, truth: float | str) -> bool:
    """Within 1 %, or the same word; a value per layer counts where every departing layer has it."""
    if isinstance(found, dict) and "by_layer" in found:
        return truth in found["by_layer"].values()
    if isinstance(truth, str) or isinstance(found, (str, bool)) or not isinstance(found, (int, float)):
        return found == truth
    return math.isclose(float(found), float(truth), rel_tol=VALUE_WITHIN, abs_tol=NOTHING if truth == 0 else 0.0)


def _repaired(candidate: Candidate, fault: Fault) -> bool | None:
    """Whether patches brought it back; None where no setting could have, and none did."""
    done = candidate.patched is not None and candidate.patched.verdict in REPAIRED
    return done if not fault.harmless and (done or fault.patchable) else None


def _recognised(candidate: Candidate, fault: Fault) -> bool | None:
    """Whether a cause that no setting repairs was proved the other way round, or said to have no patch."""
    if fault.harmless or fault.patchable or _repaired(candidate, fault):
        return None
    if candidate.proof is not None and candidate.proof.proven:
        return True
    said = {gap.what.removeprefix(A_PATCH) for gap in candidate.not_tested if gap.what.startswith(A_PATCH)}
    return any(knob in fault.knobs or knob.startswith(tuple(fault.any_knob) or ("\0",)) for knob in said)


def _words(finding: Finding) -> str:
    layers = "" if finding.layers is None else f" layers {','.join(map(str, finding.layers))}"
    return f"{finding.knob}={finding.candidate_value}{layers} ({finding.kind}, {finding.confidence})"


def share(values: Iterable[bool | None]) -> tuple[int, int]:
    """(true, asked): how often a question that applied was answered right."""
    asked = [value for value in values if value is not None]
    return sum(asked), len(asked)
