"""Norm weights that a port has folded into the projections behind them: other tensors, the same function.

    W (g * x / rms + b) = (W diag(g)) (x / rms) + W b

A port that stores W diag(g), the bias with W b added, and a norm with the gain 1 computes what the checkpoint says. Every
tensor that differs has to be exactly what folding makes of the checkpoint's; one that is not is a wrong tensor as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parity_audit.capture.session import SidePlan
from parity_audit.checks.preflight import SKETCH_TOLERANCE, same_weight, weight_findings
from parity_audit.core.types import WeightPrint, WeightTap
from parity_audit.diagnose.evidence import f64
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.stored import CheckpointTensors, laid_out
from parity_audit.specs.view import dims, knob_values, roles

FOLD_LN = "fold_ln"
"""TransformerLens' name for it, under which the comparison knows what it does to the sites."""
FINAL = "norm.final"
NORMS = {
    "norm.ln1": ("attn.q", "attn.k", "attn.v"), "norm.ln2": ("mlp.gate", "mlp.up", "moe.router"), FINAL: ("unembed",)
}  # fmt: skip
"""What reads each norm of a block with two."""
Roles = Mapping[str, WeightTap]


def folded_norms(plan: SidePlan, reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint]) -> bool:
    """Whether tensors of the candidate differ from the reference's, each of them as folded norms make it.

    Args:
        plan: the candidate's side: its spec, config and checkpoint.
        reference, candidate: the fingerprints of both sides' live tensors.
    """
    tolerance = SKETCH_TOLERANCE[plan.dtype]
    held = {item.name: item for item in candidate}
    wrong = {finding.site for finding in weight_findings(reference, candidate, plan.dtype)[0]}
    if not wrong & _norms(plan):
        return False
    copies = {item.name: [other.name for other in reference if other.sha256 == item.sha256] for item in reference}
    told = {
        name
        for path, value in _folded(plan, wrong)
        for name in wrong.intersection(copies.get(path, ()))  # a tied unembedding is listed beside the embedding
        if same_weight(fingerprint(name, value), held[name], tolerance)
    }
    return told == wrong


def _places(plan: SidePlan) -> Iterator[tuple[Roles, dict[str, Sequence[str]]]]:
    """Each block, and what is behind the blocks: its roles, its norms, and what reads each of them."""
    for layer in (None, *range(dims(plan.spec, plan.config)["n_layers"])):
        here = roles(plan.spec, plan.config, layer)
        own = (norm for norm in NORMS if norm in here and (norm == FINAL) == (layer is None))
        yield here, {norm: NORMS[norm] for norm in own}


def _norms(plan: SidePlan) -> set[str]:
    """The names of the tensors of norms that can be folded."""
    return {here[norm].path for here, norms in _places(plan) for norm in norms}


def _folded(plan: SidePlan, wrong: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Each of these tensors as it is when the norms whose own tensor is among them are folded."""
    offset = knob_values(plan.spec, plan.config).get("norm.offset")
    shift = float(offset.value) if offset is not None and isinstance(offset.value, (int, float)) else 0.0
    stored = CheckpointTensors(Path(plan.checkpoint.path))
    for here, norms in _places(plan):
        made: dict[str, Tensor] = {}
        for norm, readers in norms.items():
            if here[norm].path in wrong:
                made |= _fold(here, norm, readers, shift, stored, made)
        yield from ((name, value.float()) for name, value in made.items())


def _fold(
    here: Roles, norm: str, readers: Sequence[str], shift: float, stored: CheckpointTensors, made: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a norm and of what reads it, whole, in float64; `made` are those that another norm has changed."""

    def whole(role: str) -> Tensor | None:
        path = here[role].path if role in here else ""
        value = out.get(path, made.get(path))
        found = value if value is not None else stored(path)
        tied = role == "unembed" and found is None and "embed" in here
        return whole("embed") if tied else None if found is None else f64(found)

    out: dict[str, Tensor] = {}
    weight, bias = whole(norm), whole(f"{norm}.bias")
    if weight is None:
        return out
    out[here[norm].path] = torch.full_like(weight, 1.0 - shift)
    if bias is not None:
        out[here[f"{norm}.bias"].path] = torch.zeros_like(bias)
    for role in (role for role in here if _reads(role, readers)):
        matrix, added = whole(role), whole(f"{role}.bias")
        if matrix is None:
            continue
        part = laid_out(matrix, here[role])
        if bias is not None and added is not None:
            at = laid_out(added, here[f"{role}.bias"])
            out[here[f"{role}.bias"].path] = _put(added, here[f"{role}.bias"], at + (part @ bias).view_as(at))
        out[here[role].path] = _put(matrix, here[role], part * (weight + shift))
    return out


def _reads(role: str, readers: Sequence[str]) -> bool:
    """Whether a role is one of these, of the block or of one of its experts."""
    name, _, number = role.rpartition(".")
    return role in readers or (number.isdigit() and name in readers)


def _put(whole: Tensor, tap: WeightTap, part: Tensor) -> Tensor:
    """A stored tensor with the part that a tap names replaced."""
    flat = whole.flatten().clone()
    flat[laid_out(torch.arange(whole.numel()).view(whole.shape), tap).flatten()] = part.flatten()
    return flat.view(whole.shape)
