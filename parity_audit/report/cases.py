"""Turn a finished report of any kind into the cases of a gate, from which JUnit, SARIF and annotations are written."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from parity_audit.core.by_layer import layer_set
from parity_audit.core.gate import Case, GateReport, Status, exit_code_of_cases, with_error_if_nothing_compared
from parity_audit.core.invariance_report import CandidateInvariance, Invariance, InvarianceReport
from parity_audit.core.logprob_report import LogprobReport
from parity_audit.core.report import Candidate, Finding, Report, Verdict
from parity_audit.core.types import NotTested
from parity_audit.report.numbers import shown
from parity_audit.report.words import labels

MACHINE_ERROR_CODES = frozenset(
    ("disk", "disk-full", "env-failed", "no-server", "out-of-memory", "server-start", "timeout", "worker-died")
)
"""Codes of errors of the machine, which say nothing about the model: the same run may succeed when it is repeated."""
CANNOT_RUN = "cannot-run"
VERDICTS = {
    Verdict.EXACT: Status.PASSED,
    Verdict.PARITY: Status.PASSED,
    Verdict.MISMATCH: Status.FAILED,
    Verdict.INCONCLUSIVE: Status.ERROR,
    Verdict.ERROR: Status.ERROR,
}


def gate_of(report: Report | LogprobReport | InvarianceReport) -> GateReport:
    """Return a gate with the cases of one report; if nothing was compared, one case of the gate states that."""
    cases = with_error_if_nothing_compared(tuple(cases_of(report)))
    took = report.seconds.get("total", sum(report.seconds.values()))
    return GateReport(title=report.model, cases=cases, seconds=took, exit_code=exit_code_of_cases(cases))


def status_of_error(code: str) -> Status:
    """Return the status that an error code gives a case.

    A release that is known not to run the model is not tested; errors in `MACHINE_ERROR_CODES` are failures of the machine; all
    others are errors of the tested program.
    """
    if code == CANNOT_RUN:
        return Status.NOT_TESTED
    return Status.INFRA if code in MACHINE_ERROR_CODES else Status.ERROR


@singledispatch
def cases_of(report: object) -> list[Case]:
    """Return the cases of a finished report."""
    raise TypeError(f"no cases of {type(report).__name__}")


@cases_of.register
def _(report: Report) -> list[Case]:
    """Return one case per candidate (per finding, if it mismatches) and one for each thing that was not tested."""
    group = report.model
    if not report.candidates and report.error:
        code, why = str(report.error.get("code", "")), str(report.error.get("message", ""))
        return [Case(group=group, name="audit", status=status_of_error(code), message=why, rule=code)]
    found = [
        case
        for one, name in zip(report.candidates, labels(report), strict=True)
        for case in (*candidate_cases(group, name, one), *_untested(f"{group}.{name}", one.not_tested))
    ]
    return [*found, *_untested(group, report.not_tested)]


@cases_of.register
def _(report: LogprobReport) -> list[Case]:
    """Return one case for the verdict, or one per finding of a mismatch; then one for each thing that was not tested."""
    group, status, gaps = report.model, VERDICTS[report.verdict], _untested(report.model, report.not_tested)
    if status is not Status.FAILED or not report.findings:
        return [Case(group=group, name="logprobs", status=status, message=report.why, rule="logprobs"), *gaps]
    named = [
        Case(
            group=group, name=f"logprobs {one.leg}: {one.name}", status=status, message=one.message, details=one.hint,
            rule=one.name,
        )
        for one in report.findings
    ]  # fmt: skip
    return [*named, *gaps]


@cases_of.register
def _(report: InvarianceReport) -> list[Case]:
    """Return one case per backend, and one for each thing that was not tested."""
    return [case for one in report.candidates for case in _invariance(report.model, one)]


def candidate_cases(group: str, name: str, one: Candidate) -> list[Case]:
    """Return one failed case per finding of a candidate that mismatches; for any other candidate, one case."""
    status = VERDICTS[one.verdict] if one.error is None else status_of_error(str(one.error.get("code", "")))
    if status is Status.FAILED and one.findings:
        return [_finding(group, name, one, finding) for finding in one.findings]
    code = str((one.error or {}).get("code", "")) or "parity"
    details = str((one.error or {}).get("found", "") or (one.error or {}).get("hint", ""))
    return [Case(group=group, name=name, status=status, message=one.why, details=details, rule=code)]


def _finding(group: str, name: str, one: Candidate, finding: Finding) -> Case:
    """Return the case of one finding: the knob, its layers, site and values, and the patches for the knob."""
    patches = [patch.code for patch in one.patches if patch.knob == finding.knob and patch.code]
    return Case(
        group=group, name=f"{name}: {finding.knob}", status=Status.FAILED, message=in_one_line(finding),
        details="\n\n".join((finding.message, *(f"patch for {name}:\n{code}" for code in patches))),
        rule=finding.knob,
    )  # fmt: skip


def in_one_line(finding: Finding) -> str:
    """Return the knob, layers, site and both values in one line; for a hook, its message in place of the values."""
    where = "everywhere" if finding.layers is None else f"in {layer_set(finding.layers)}"
    both = f"reference {shown(finding.reference_value)}, candidate {shown(finding.candidate_value)}"
    values = finding.message if finding.kind == "hook" and finding.message else both
    return f"{finding.knob} {where}, seen at {finding.site}: {values}"


def _invariance(group: str, one: CandidateInvariance) -> list[Case]:
    status = Status.FAILED if one.verdict is Invariance.BROKEN else Status.PASSED
    if one.verdict is Invariance.ERROR:
        status = status_of_error(one.code)
    case = Case(group=group, name=f"{one.backend}: invariance", status=status, message=one.why, rule="invariance")
    return [case, *_untested(f"{group}.{one.backend}", one.not_tested)]


def _untested(group: str, gaps: Iterable[NotTested]) -> list[Case]:
    return [
        Case(group=group, name=gap.what, status=Status.NOT_TESTED, message=gap.why, rule="not-tested") for gap in gaps
    ]
