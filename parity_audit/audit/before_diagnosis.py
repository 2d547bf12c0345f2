"""The part of a candidate's result that needs no further run: its comparison, tokens, weights, settings and detection limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parity_audit.audit.reference import Reference
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.checks.folded import folding_findings
from parity_audit.checks.limits import detection_limits
from parity_audit.checks.preflight import config_warnings, length_gap, token_findings, weight_findings
from parity_audit.checks.sharding import Sharded, sharding_findings
from parity_audit.checks.token_ids import special_tokens
from parity_audit.checks.weights import with_origins
from parity_audit.compare.deltas import Comparison
from parity_audit.compare.processing import Allowance
from parity_audit.compare.verdict import agreement_outside, first_divergence
from parity_audit.core.report import Candidate, Finding, Verdict
from parity_audit.core.types import NotTested
from parity_audit.diagnose.identities import hook_warnings, stored_factors
from parity_audit.diagnose.narrow import dtype_finding
from parity_audit.diagnose.returned import returned_findings
from parity_audit.formulas.stored import CheckpointTensors, role_tensor
from parity_audit.specs.view import dims, effective_values, roles, spec_values
from parity_audit.specs.wrapped import WRAPPED_IN

TEXT_ALONE = NotTested(what="images, sound and video", why="the text model inside is given text, and nothing else")

RAISED = (
    "nothing is claimed of a program that raises an error in a probe which the reference runs; where such inputs do not matter, "
    "name the probes that do with --probe"
)


def before_diagnosis(
    session: Session, capture: Capture, comparison: Comparison, verdict: Verdict, why: str, reference: Reference,
    allowed: Allowance | None,
) -> Candidate:  # fmt: skip
    """Return the candidate's result with its verdict and everything that can be reported without running it again.

    A finding about the weights, the dtype, the ranks of a sharded engine or the returned values turns the verdict into a
    mismatch, whatever the comparison of the outputs says.
    """
    plan, about = session.plan, session.description()
    said_of_tokens, warnings, gaps = token_findings(reference.session.description(), about, special_tokens(plan.config))
    why = f"{why}; {said_of_tokens}" if said_of_tokens else why
    gaps = [*gaps, *about.not_run, *_not_decoded(reference), *([TEXT_ALONE] if WRAPPED_IN in plan.config else [])]
    narrow = dtype_finding(capture, reference.capture, plan.dtype)
    dtype = plan.dtype if narrow is None else str(narrow.evidence["dtype"])
    cast = narrow is not None and narrow.evidence["throughout"]
    weights, unseen = _weights(reference, capture, dtype if cast else plan.dtype, allowed)
    cut = sharding_findings(sharded(session, capture, reference))
    said_of = {name for finding in cut for name in finding.evidence.get("tensors", ())}
    weights = [*([narrow] if narrow else []), *cut, *(finding for finding in weights if finding.site not in said_of)]
    gaps.append(length_gap(capture, about))
    outputs, said = returned_findings(capture, comparison, dtype)
    weights, warnings = [*weights, *outputs], [*warnings, *said]
    warnings += [] if allowed is None else [allowed.words()]
    live = effective_values(plan.spec, plan.backend_key, about, plan.config)
    warnings += config_warnings(spec_values(plan.spec, plan.config), live, session.label)
    warnings += hook_warnings(capture, session.label, dtype, stored_factors(plan))
    warnings += [RAISED] if comparison.broke_off else []
    first = first_divergence(comparison)
    verdict, why = (Verdict.MISMATCH, weights[0].message) if weights else (verdict, why)
    outside = agreement_outside(comparison) if verdict is Verdict.MISMATCH else ""
    return Candidate(
        backend=plan.ref.name, package=about.package, version=about.version, settings=about.settings,
        dtype=plan.dtype, device=plan.device, verdict=verdict, why=f"{why}; {outside}" if outside else why,
        logits=comparison.logits,
        worst_tokens=comparison.worst_tokens, sites=comparison.sites,
        first_divergence={"site": first.site, "layer": first.layer, "probe": first.probe} if first else None,
        findings=tuple(weights), warnings=tuple(warnings), not_visible=(*capture.manifest.not_visible, *comparison.not_comparable),
        not_tested=(*comparison.not_tested, *capture.manifest.not_tested, *gaps, *unseen),
    )  # fmt: skip


def sharded(session: Session, capture: Capture, reference: Reference) -> Sharded:
    """Return the data that the sharding checks need about a side that ran on several ranks."""
    plan = session.plan
    stored, n_layers = CheckpointTensors(Path(plan.checkpoint.path)), dims(plan.spec, plan.config)["n_layers"]
    own = {at: roles(plan.spec, plan.config, at) for at in (None, *range(n_layers))}
    return Sharded(
        capture=capture, reference=reference.capture, values=session.description().ranks_differ,
        spec=spec_values(plan.spec, plan.config), dtype=plan.dtype,
        roles={tap.path: role for taps in own.values() for role, tap in taps.items()},
        weight=lambda role, at: role_tensor(stored, own[at], role, tied=False),
    )  # fmt: skip


def _not_decoded(reference: Reference) -> list[NotTested]:
    """Return a gap in the report ("not tested") if no probe of the run is decoded from the KV cache, else nothing."""
    decoded = any(probe.decode_from is not None for probe in reference.probes)
    return [] if decoded else [NotTested(what="decoding from the cache", why="no probe of this run decodes")]


def with_limits(result: Candidate, comparison: Comparison, reference: Reference) -> Candidate:
    """Return the result with the smallest errors that this comparison could have detected."""
    if reference.sensitivity is None:
        return result
    limits, gaps = detection_limits(reference.sensitivity, comparison)
    return dataclasses.replace(
        result, detection=limits, detection_limits={item.knob: item.limit for item in limits},
        not_tested=(*result.not_tested, *gaps),
    )  # fmt: skip


def _weights(
    reference: Reference, capture: Capture, dtype: str, allowed: Allowance | None
) -> tuple[list[Finding], list[NotTested]]:
    """Compare the candidate's tensors with the checkpoint's, and return the findings and the tensors that were not compared.

    If the candidate's weights are processed, its tensors are compared with what the processing should give. If that is not
    known, they are not compared.
    """
    stored, held = reference.capture.manifest.weights, capture.manifest.weights
    if allowed is None:
        weights, unseen = weight_findings(stored, held, dtype)
        return with_origins(weights, stored, held, dtype), unseen
    if allowed.weights is None:
        return [], allowed.gaps()
    weights, unseen = folding_findings(allowed.weights, stored, held, dtype)
    return with_origins(weights, allowed.weights, held, dtype), [*allowed.gaps(), *unseen]
