"""Findings of tensors that are not the reference's, made fewer: exchanged blocks are one matter, and what follows from
a wrong tensor is none of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from parity_audit.core.report import Finding
from parity_audit.core.types import WeightPrint
from parity_audit.diagnose.preflight import SKETCH_TOLERANCE, same_weight

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
ROLES_OF = {
    "logits": ("unembed",), "embed": ("embed",), "qkv": ("attn.q", "attn.k", "attn.v"), "attn_proj": ("attn.o",),
    "mlp": ("mlp.",), "norm": ("norm.",), "final_norm": ("norm.final",), "qk_norm": ("qk_norm.",),
}  # fmt: skip
READ_OFF = ("weights.", "norm.weight", "norm.bias", "qk_norm.weight", "qk_norm.bias")


def with_origins(
    findings: Sequence[Finding], reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint], dtype: str
) -> list[Finding]:
    """The findings, each with the tensor that the candidate holds instead, where it is another of the reference's."""
    held = {item.name: item for item in candidate}
    named = [_with_origin(finding, held[finding.site], reference, SKETCH_TOLERANCE[dtype]) for finding in findings]
    return _exchanged(named)


def _with_origin(finding: Finding, held: WeightPrint, reference: Sequence[WeightPrint], tolerance: float) -> Finding:
    origin = next((item.name for item in reference if item.rms > 0 and same_weight(item, held, tolerance)), None)
    if origin is None or held.rms == 0:
        return finding
    return dataclasses.replace(
        finding, candidate_value=origin, reference_value=finding.site, evidence={**finding.evidence, "holds": origin},
        message=f"tensor {finding.site} of the candidate holds the reference's {origin}",
    )  # fmt: skip


def _exchanged(findings: Sequence[Finding]) -> list[Finding]:
    """Tensors that all come from the same other block become one finding per exchange."""
    moves: dict[tuple[int, int], list[Finding]] = {}
    for finding in findings:
        move = _move(finding)
        if move is not None:
            moves.setdefault(move, []).append(finding)
    whole = {move: group for move, group in moves.items() if len(group) > 1}
    if not whole:
        return list(findings)
    gone = {id(finding) for group in whole.values() for finding in group}
    return [_moved(whole), *(finding for finding in findings if id(finding) not in gone)]


def _move(finding: Finding) -> tuple[int, int] | None:
    """(block, block whose tensor it holds), None where it is not the same tensor of another block."""
    origin = finding.evidence.get("holds")
    if origin is None or NUMBER.sub("{l}", finding.site) != NUMBER.sub("{l}", origin):
        return None
    own, other = NUMBER.search(finding.site), NUMBER.search(origin)
    return (int(own[0]), int(other[0])) if own and other and own[0] != other[0] else None


def _moved(moves: Mapping[tuple[int, int], Sequence[Finding]]) -> Finding:
    pairs = sorted(moves)
    findings = [finding for move in pairs for finding in moves[move]]
    first, said = findings[0], ", ".join(f"block {own} holds those of block {other}" for own, other in pairs)
    return dataclasses.replace(
        first, layers=tuple(sorted({own for own, _ in pairs})), reference_value="each block's own", candidate_value=said,
        evidence={**first.evidence, "tensors": [finding.site for finding in findings]},
        message=f"tensors of blocks are exchanged: {said}",
    )  # fmt: skip


def without_consequences(
    findings: Sequence[Finding], weights: Sequence[Finding], tensor_of: Mapping[tuple[str, int | None], str]
) -> list[Finding]:
    """The findings without those that only repeat that a tensor is wrong.

    `tensor_of`: the checkpoint tensor of a role in a layer (None: outside the blocks). Fits that say *how* a tensor
    differs stay, unless the tensor is known to be another one of the checkpoint.
    """
    wrong = {name for finding in weights for name in finding.evidence.get("tensors", [finding.site])}
    moved = {
        name
        for finding in weights
        if "holds" in finding.evidence
        for name in finding.evidence.get("tensors", [finding.site])
    }
    return [finding for finding in findings if not _follows(finding, wrong, moved, tensor_of)]


def _follows(
    finding: Finding, wrong: set[str], moved: set[str], tensor_of: Mapping[tuple[str, int | None], str]
) -> bool:
    if finding.kind == "unexplained":
        roles, known = ROLES_OF.get(str(finding.evidence.get("component")), ()), wrong
    elif finding.knob.startswith(READ_OFF) and finding.layers:
        roles, known = roles_of_knob(finding.knob), moved
    else:
        return False
    layers = finding.layers or (None,)
    return bool(roles) and all(
        any(role.startswith(roles) and layer == at and name in known for (role, at), name in tensor_of.items())
        for layer in layers
    )


def roles_of_knob(knob: str) -> tuple[str, ...]:
    """The roles that a fit of a tensor speaks of: `weights.attn.q.scale` of attn.q, `norm.weight` of every norm."""
    if knob.startswith("weights."):
        return (knob.removeprefix("weights.").removesuffix(".scale"),)
    return ("qk_norm.",) if knob.startswith("qk_norm.") else ("norm.",)
