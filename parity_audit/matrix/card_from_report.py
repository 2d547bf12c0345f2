"""Make cards from finished reports of an audit, of log-probabilities or of invariance."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import singledispatch
from typing import Any

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import Asked, Card, CardFinding, Question
from parity_audit.core.errors import ParityError
from parity_audit.core.invariance_report import CandidateInvariance, Invariance, InvarianceReport
from parity_audit.core.limits import share_of_limit
from parity_audit.core.logprob_report import Leg, LogprobFinding, LogprobReport
from parity_audit.core.report import Candidate, Finding, Report, Side, Verdict
from parity_audit.report.candidate_content import KINDS_WITHOUT_VALUES
from parity_audit.report.invariance_content import largest_change

VERDICTS = {
    Invariance.BITWISE: Verdict.EXACT,
    Invariance.CLASS_ONLY: Verdict.PARITY,
    Invariance.NUMERIC: Verdict.PARITY,
    Invariance.BROKEN: Verdict.MISMATCH,
    Invariance.ERROR: Verdict.ERROR,
}
"""The verdict of a card for each result of invariance: an answer that changes by no more than rounding is at parity."""
LOGPROB_FIGURES = ("rmse_dlogp", "abs_dlogp_mean", "k3_rollout_train")
ENGINE, TRAINER = "engine", "trainer"


@singledispatch
def cards_of(report: object, given: Sequence[str] | None, question: Asked) -> list[Card]:
    """Return a card for each candidate of a finished report.

    Args:
        given: the BACKEND strings as they were requested, in the order of the report; if None, the cards name the releases
            that ran.
        question: the whole question except its candidate.
    """
    raise TypeError(f"no card of {type(report).__name__}")


@cards_of.register
def _(report: Report, given: Sequence[str] | None, question: Asked) -> list[Card]:
    cells = _cells(given, [(one.backend, one.version) for one in report.candidates], question)
    return [_audit_card(report, one, asked) for one, asked in zip(report.candidates, cells, strict=True)]


@cards_of.register
def _(report: InvarianceReport, given: Sequence[str] | None, question: Asked) -> list[Card]:
    ran = [(one.backend, "" if "==" in one.backend else one.version) for one in report.candidates]
    cells = _cells(given, ran, question)
    return [_invariance_card(report, one, asked) for one, asked in zip(report.candidates, cells, strict=True)]


@cards_of.register
def _(report: LogprobReport, given: Sequence[str] | None, question: Asked) -> list[Card]:
    """Return one card: of the engine, or of the rollout file if no engine was run."""
    engine = next((leg for leg in report.legs if leg.name.startswith(ENGINE)), None)
    (asked,) = _cells(given, [(engine.backend, engine.version) if engine else ("rollouts", "")], question)
    return [_logprob_card(report, engine, asked)]


def failed_card(asked: Asked, error: ParityError) -> Card:
    """Return the card of a cell whose run ended in an error before a candidate was judged."""
    return Card(
        asked=asked, command=command_of(asked), date=_now(), architecture="", weights={}, reference=None, package="",
        version="", settings={}, probes=(), verdict=Verdict.ERROR, why=error.message, error=_error(error.to_json()),
    )  # fmt: skip


def command_of(asked: Asked) -> str:
    """Return the command line that runs one cell."""
    words = ["parity-audit", *([] if asked.question is Question.AUDIT else [asked.question.value]), asked.model]
    words += {None: [], "mini": ["--miniature"]}.get(asked.synthetic, ["--synthetic", str(asked.synthetic)])
    believed, judged = ("-t", "-e") if asked.question is Question.LOGPROBS else ("-r", "-c")
    words += [believed, asked.reference] if asked.reference != "hf" else []
    words += [judged, asked.candidate] if asked.candidate else []
    words += [word for name in asked.probes for word in ("--probe", name)]
    words += ["--seed", str(asked.seed)] if asked.seed else []
    words += ["--dtype", asked.dtype] if asked.dtype != "float32" else []
    words += ["--device", asked.device] if asked.device != "cpu" else []
    return shlex.join([*words, *([] if asked.repair else ["--no-repair"]), *asked.options])


def _cells(given: Sequence[str] | None, ran: Iterable[tuple[str, str]], question: Asked) -> list[Asked]:
    """Return the question of each candidate."""
    releases = [f"{backend}=={version}" if version else backend for backend, version in ran]
    names = releases if given is None else [str(parse_backend(text)) for text in given]
    return [dataclasses.replace(question, candidate=name) for name in names]


def _audit_card(report: Report, candidate: Candidate, asked: Asked) -> Card:
    worst = max(candidate.sites, key=share_of_limit, default=None)
    return Card(
        asked=asked, command=command_of(asked), date=_now(),
        architecture=report.architecture, weights=report.weights, reference=report.reference,
        package=candidate.package, version=candidate.version, settings=candidate.settings, probes=report.probes,
        verdict=candidate.verdict, why=candidate.why, agreement=candidate.logits,
        worst_site=worst.site if worst else "", worst_ratio=None if worst is None else worst.noise_ratio,
        findings=tuple(_in_short(item) for item in candidate.findings),
        patched=candidate.patched.verdict if candidate.patched else None,
        detection_limits=candidate.detection_limits, not_tested=(*candidate.not_tested, *report.not_tested),
        error=_error(candidate.error),
    )  # fmt: skip


def _invariance_card(report: InvarianceReport, one: CandidateInvariance, asked: Asked) -> Card:
    """Return the card of one backend compared with itself; its figures are the largest changes over all conditions."""
    said: dict[str, Any] = {key: report.subject[key] for key in ("tokens", "largest_batch") if key in report.subject}
    return Card(
        asked=asked, command=command_of(asked), date=_now(), architecture="", weights=report.weights, reference=None,
        package=one.package, version=one.version, settings=one.settings, probes=({"name": "followed", **said},),
        verdict=VERDICTS[one.verdict],
        said=one.verdict.value, why=one.why, figures=largest_change(one), worst_site=one.first_site or "",
        not_tested=one.not_tested, error={"code": one.code, "message": one.why} if one.error else None,
    )  # fmt: skip


def _logprob_card(report: LogprobReport, engine: Leg | None, asked: Asked) -> Card:
    """Return the card of an engine compared with a trainer; its noise ratio is the largest of all legs but the trainer's."""
    pair = report.pairs[0] if report.pairs else None
    ratios = [leg.noise_ratio for leg in report.legs if leg.name != TRAINER and leg.noise_ratio is not None]
    figures = {} if pair is None else {name: pair.metrics[name] for name in LOGPROB_FIGURES if name in pair.metrics}
    sampled = () if pair is None else ({"name": "sampled", "tokens": pair.tokens, "sequences": pair.sequences},)
    return Card(
        asked=asked, command=command_of(asked), date=_now(), architecture="", weights=report.weights,
        reference=next((_side(leg, asked.device) for leg in report.legs if leg.name == TRAINER), None),
        package=engine.package if engine else "", version=engine.version if engine else "",
        settings=engine.settings if engine else {}, probes=sampled, verdict=report.verdict, why=report.why,
        figures={**figures, **({"noise_ratio": max(ratios)} if ratios else {})},
        findings=tuple(_said(item) for item in report.findings), not_tested=report.not_tested,
    )  # fmt: skip


def _side(leg: Leg, device: str) -> Side:
    return Side(
        backend=leg.backend, package=leg.package, version=leg.version, settings=leg.settings, dtype=leg.dtype, device=device
    )  # fmt: skip


def _in_short(finding: Finding) -> CardFinding:
    return CardFinding(
        knob=finding.knob, kind=finding.kind, layers=finding.layers, reference_value=finding.reference_value,
        candidate_value=finding.candidate_value, spec_value=finding.spec_value,
        departs_from_spec=finding.departs_from_spec, message=finding.message if finding.kind in KINDS_WITHOUT_VALUES else "",
    )  # fmt: skip


def _said(finding: LogprobFinding) -> CardFinding:
    """Return a finding in short form; `departs_from_spec` has the leg that causes the difference in place of a side."""
    return CardFinding(
        knob=finding.name, kind="logprobs", layers=None, reference_value=None, candidate_value=None, spec_value=None,
        departs_from_spec=finding.leg, message=f"{finding.name} in {finding.leg}: {finding.message}",
    )  # fmt: skip


def _error(error: dict[str, object] | None) -> dict[str, str] | None:
    """Return the code and message of an error; other fields, such as paths on this machine, are left out."""
    return None if error is None else {key: str(error.get(key, "")) for key in ("code", "message")}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
