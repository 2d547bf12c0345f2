"""Audit the layers on given token sequences, to find the component that makes two sides' log-probabilities disagree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parity_audit.audit.context import AuditContext
from parity_audit.audit.run import run_audit
from parity_audit.core.logprob_report import LogprobFinding
from parity_audit.core.report import Report, Verdict
from parity_audit.core.rollouts import Completion
from parity_audit.core.types import BackendRef, Probe

PURPOSE = "a sampled sequence on which engine and trainer disagree most"


def probes_of(completions: Sequence[Completion]) -> tuple[Probe, ...]:
    """Return one probe per completion, run as a whole, and one more that decodes the first completion after its prompt."""
    whole = [_probe(f"worst-{number}", completion) for number, completion in enumerate(completions, 1)]
    first = dataclasses.replace(whole[0], name="worst-1-decoded", decode_from=len(completions[0].prompt_ids))
    return (*whole, first)


def _probe(name: str, completion: Completion) -> Probe:
    ids = (*completion.prompt_ids, *completion.token_ids)
    return Probe(name=name, purpose=PURPOSE, token_ids=(ids,), mask=((1,) * len(ids),))


def layer_findings(
    context: AuditContext, trainer: BackendRef, engine: BackendRef, completions: Sequence[Completion]
) -> tuple[LogprobFinding, ...]:
    """Return what the layer audit of these sequences finds in the engine; its own report goes into the context's folder."""
    plan = dataclasses.replace(context.plan, probes=probes_of(completions))
    report = run_audit(dataclasses.replace(context, plan=plan), trainer, [engine], accept_patched=False)
    return tuple(_found(report))


def _found(report: Report) -> list[LogprobFinding]:
    candidate = report.candidates[0]
    found = [
        LogprobFinding(
            name=finding.knob, leg="engine", message=finding.message or f"{finding.kind} at {finding.site}, by the layer audit",
            evidence={
                "reference": str(finding.reference_value), "candidate": str(finding.candidate_value), "first seen at": finding.site,
                "layers": "all" if finding.layers is None else ", ".join(map(str, finding.layers)),
            },
        )
        for finding in candidate.findings
    ]  # fmt: skip
    if found or candidate.verdict is not Verdict.MISMATCH:
        return found
    where = (candidate.first_divergence or {}).get("site", "")
    return [
        LogprobFinding(
            name="unexplained", leg="engine", message=f"the layer audit: {candidate.why}", evidence={"first": where}
        )
    ]
