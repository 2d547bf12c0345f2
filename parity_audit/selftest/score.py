"""Scores the findings of an audit against the fault that was planted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity_audit.core.by_layer import each_layer
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
    """The score of one fault. A question that does not apply to it has the answer None.

    - `detected`: the verdict is a mismatch; for a clean port or harmless plant, that it is not. False if the run ended in an error.
    - `placed`: the first divergence is at the right site. `first_site`: the site that was found.
    - `named`: every knob was found. `layers`, `valued`, `extent`: so were the layers, the value within 1 % and the extent.
    - `repaired`: patches brought the candidate back to parity.
    - `proved`: a fault that no setting repairs was imposed on the reference, which then agreed with the candidate.
    - `recognised`: such a fault was proved, or reported to have no patch.
    - `template`: the fault comes from a template.
    - `parts`: what became of each part of a stacked fault (`NAMED`, `LISTED` or `MISSED`).
    - `false_alarms`: findings that name nothing that was planted.
    - `confidence`: the largest confidence of the right findings.
    - `found`: all findings, in words.
    """

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
    proved: bool | None = None
    template: bool = False
    parts: tuple[str, ...] = ()
    false_alarms: tuple[str, ...] = ()
    confidence: float = 0.0
    first_site: str = ""
    found: tuple[str, ...] = ()
    error: str = ""


def score(fault: Fault, candidate: Candidate, *, repair: bool = True) -> Score:
    """Return the score of one candidate's findings; the questions about repairs are None if no repair was tried."""
    named = [finding for finding in candidate.findings if finding.kind != "unexplained"]
    right = _matched(named, fault)
    hits = [finding for finding in right if finding is not None]
    first = str((candidate.first_divergence or {}).get("site", ""))
    every_part = len(hits) == len(right)
    # An unexplained finding may stand for a part that was not named; if all parts were named, it is a false alarm.
    wrong = [
        finding
        for finding in (candidate.findings if every_part else named)
        if finding.knob not in (*fault.knobs, *fault.also)
    ]
    single = hits[0] if len(fault.knobs) == 1 and hits else None
    return Score(
        id=fault.id, model=fault.model, verdict=candidate.verdict.value,
        detected=(candidate.verdict in WRONG) != fault.harmless,
        placed=None if fault.site is None or fault.harmless else first == fault.site,
        named=None if fault.harmless else every_part,
        layers=None if fault.layers is None or single is None else _all_layers(named, fault) == fault.layers,
        valued=None if fault.value is None or fault.harmless else single is not None and _close(single.candidate_value, fault.value),
        extent=None if fault.extent is None else any(fault.extent in str(item.evidence.get("extent", "")) for item in hits),
        repaired=_repaired(candidate, fault) if repair else None,
        recognised=_recognised(candidate, fault) if repair else None,
        proved=_proved(candidate, fault) if repair else None, template=fault.template,
        parts=_parts(right, candidate.findings, fault),
        false_alarms=tuple(_words(finding) for finding in (candidate.findings if fault.harmless else wrong)),
        confidence=max((finding.confidence for finding in hits), default=0.0), first_site=first,
        found=tuple(_words(finding) for finding in candidate.findings),
        error=str((candidate.error or {}).get("message", "")),
    )  # fmt: skip


def not_judged(fault: Fault, error: str) -> Score:
    """Return the score of a fault whose audit had no result: it counts as missed, and a clean port does not count as right."""
    asked = None if fault.harmless else False
    return Score(
        id=fault.id, model=fault.model, verdict=Verdict.ERROR.value, detected=False, named=asked,
        parts=tuple(MISSED for _ in fault.sites), error=error,
    )  # fmt: skip


def _matched(named: Sequence[Finding], fault: Fault) -> list[Finding | None]:
    """Return the finding of each part of a fault, in the order of `fault.knobs`; None for a part without one.

    A finding counts for one part only.
    """
    free = list(named)
    found: list[Finding | None] = []
    for knob in fault.knobs:
        found.append(next((item for item in free if item.knob == knob), None))
        free = [item for item in free if item is not found[-1]]
    return found


def _parts(right: Sequence[Finding | None], findings: Sequence[Finding], fault: Fault) -> tuple[str, ...]:
    """Return for each part of a stacked fault whether it was named, its site was listed as unexplained, or it was missed."""
    open_sites = {local_name(finding.site) for finding in findings if finding.kind == "unexplained"}
    said = [
        NAMED if found is not None else LISTED if site in open_sites else MISSED
        for found, site in zip(right, fault.sites, strict=False)
    ]
    return tuple(said)


def _all_layers(found: Iterable[Finding], fault: Fault) -> list[int]:
    """Return the layers of all findings that name the fault; a value that differs between layers gives several findings."""
    return sorted({layer for finding in found if finding.knob in fault.knobs for layer in finding.layers or ()})


def _close(found: KnobValue, truth: float | str) -> bool:
    """Whether a value is within 1 % of the truth, or the same word; of a value per layer, one of the layers is enough."""
    by_layer = each_layer(found)
    if by_layer is not None:
        return any(_close(own, truth) for own in by_layer.values())
    if isinstance(truth, str) or isinstance(found, (str, bool)) or not isinstance(found, (int, float)):
        return found == truth
    return math.isclose(float(found), float(truth), rel_tol=VALUE_WITHIN, abs_tol=NOTHING if truth == 0 else 0.0)


def _repaired(candidate: Candidate, fault: Fault) -> bool | None:
    """Whether patches brought the candidate back to parity; None if it is harmless, or if no setting can repair it and none did."""
    done = candidate.patched is not None and candidate.patched.verdict in REPAIRED
    return done if not fault.harmless and (done or fault.patchable) else None


def _recognised(candidate: Candidate, fault: Fault) -> bool | None:
    """Whether a fault that no setting repairs was proved (see `_proved`) or reported to have no patch; None for other faults."""
    proved = _proved(candidate, fault)
    if proved is not False:
        return proved
    said = {gap.what.removeprefix(A_PATCH) for gap in candidate.not_tested if gap.what.startswith(A_PATCH)}
    return not said.isdisjoint((*fault.knobs, *fault.also))


def _proved(candidate: Candidate, fault: Fault) -> bool | None:
    """Whether a fault that no setting repairs was imposed on the reference, which then agreed; None if a setting repairs it."""
    if fault.harmless or fault.patchable or _repaired(candidate, fault):
        return None
    return candidate.proof is not None and candidate.proof.proven


def _words(finding: Finding) -> str:
    layers = "" if finding.layers is None else f" layers {','.join(map(str, finding.layers))}"
    return f"{finding.knob}={finding.candidate_value}{layers} ({finding.kind}, {finding.confidence})"


def share(values: Iterable[bool | None]) -> tuple[int, int]:
    """Return (how often a question was answered right, how often it applied)."""
    asked = [value for value in values if value is not None]
    return sum(asked), len(asked)
