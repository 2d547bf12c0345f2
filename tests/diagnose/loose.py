"""Evidence from tensors at hand: one layer whose sites a test computes with real modules or by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tiny_port import probe
from torch import Tensor

from parity_audit.core.report import Finding
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, KnobFit
from parity_audit.diagnose.findings import is_equivalent_implementation
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.sides import sites_with_formula
from parity_audit.diagnose.fitting import READERS, causes_at, identify_by_formula, read_structure
from parity_audit.diagnose.localise import component_of
from parity_audit.specs.schema import ResolvedKnob

SHORT = (probe("short", (48,)), probe("ragged", (40, 23, 9), seed=2))


def loose(
    sites: Mapping[str, Tensor] | Mapping[tuple[str, str], Tensor], *, weights: Mapping[str, Tensor] | None = None,
    probes: tuple[Probe, ...] = SHORT, layer: int | None = 0, side: str = "candidate", dtype: str | None = None, **knobs: object,
) -> dict[int | None, Evidence]:  # fmt: skip
    """One layer's evidence; a site without a probe's name belongs to the first probe. `knobs`: `__` for dots."""
    held = {key if isinstance(key, tuple) else (probes[0].name, key): value for key, value in sites.items()}
    any_q = next((x for (_, site), x in held.items() if site in ("rot_q", "q")), torch.zeros(1, 1, 1, 1))
    any_k = next((x for (_, site), x in held.items() if site in ("rot_k", "k")), any_q)
    dims = {"d_model": 64, "n_heads": any_q.shape[2], "n_kv_heads": any_k.shape[2], "d_head": any_q.shape[3],
            "d_mlp": 64, "n_layers": 1, "d_vocab": 131, "n_experts": 12}  # fmt: skip
    known = {name.replace("__", "."): ResolvedKnob(value=value) for name, value in knobs.items()}
    return {layer: Evidence(
        side=side, layer=layer, dims=dims, knobs=known, probes=probes, tensor=lambda probe, site: held.get((probe, site)),
        weight=lambda role: (weights or {}).get(role), dtype=dtype,
    )}  # fmt: skip


def explained(candidate: dict[int | None, Evidence], reference: dict[int | None, Evidence]) -> dict[str, Finding]:
    """The findings of the formulas by knob; of several sites that say the same, one."""
    components = {component_of(site) for site in sites_with_formula(candidate)}
    findings, _ = identify_by_formula(candidate, reference, components)
    return {finding.knob: finding for finding in findings}


def departing(evidence: dict[int | None, Evidence]) -> dict[str, KnobFit]:
    """What the formulas say of a side where it departs from its spec, by knob."""
    return {fit.knob: fit for fit in causes(evidence, evidence, None).candidate}


def differ(candidate: dict[int | None, Evidence], reference: dict[int | None, Evidence]) -> dict[str, Finding]:
    """What structure alone says, by knob."""
    findings, _ = read_structure(candidate, reference, frozenset().union(*(components for _, components in READERS)))
    assert len({finding.knob for finding in findings}) == len(findings), "one knob was reported twice"
    return {finding.knob: finding for finding in findings}


def told(candidate: dict[int | None, Evidence], reference: dict[int | None, Evidence]) -> dict[str, Finding]:
    """The findings by knob, as a diagnosis has them: by formula, and by structure where no formula explains a site."""
    findings, _ = causes_at(candidate, reference, sites_with_formula(candidate))
    findings = [finding for finding in findings if not is_equivalent_implementation(finding)]
    assert len({finding.knob for finding in findings}) == len(findings), "one knob was reported twice"
    return {finding.knob: finding for finding in findings}
