"""Recognise norm weights that a port has folded into the projections after them: different tensors, the same function.

    W (g * x / rms + b) = (W diag(g)) (x / rms) + W b

A port that stores W diag(g), the bias with W b added, and a norm with the gain 1 computes what the checkpoint defines. Each
tensor that differs must be exactly what folding makes of the checkpoint's tensor; otherwise it is reported as a wrong tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parity_audit.capture.session import SidePlan
from parity_audit.checks.preflight import SKETCH_TOLERANCE, same_weight, weight_findings
from parity_audit.core.report import Finding
from parity_audit.core.types import NotTested, WeightPrint, WeightTap
from parity_audit.diagnose.evidence import f64
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.stored import CheckpointTensors, laid_out
from parity_audit.specs.view import dims, knob_values, roles

FOLD_LN = "fold_ln"
"""TransformerLens' name for this folding, by which the comparison knows how it changes the sites."""
UNFOLDED, NOT_AS_FOLDED = "the norm before it is not folded in", "the values are not those of a folded norm"
FINAL = "norm.final"
GAINS = "norm."
"""The prefix of the roles of norm tensors."""
READERS = {
    "norm.ln1": ("attn.q", "attn.k", "attn.v"), "norm.ln2": ("mlp.gate", "mlp.up", "moe.router"), FINAL: ("unembed",)
}  # fmt: skip
"""The roles that read the output of each norm, in a block with two norms and behind the blocks."""
Roles = Mapping[str, WeightTap]


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Fingerprints of both sides' tensors by name, and the names of those that differ (`wrong`)."""

    reference: Mapping[str, WeightPrint]
    candidate: Mapping[str, WeightPrint]
    wrong: frozenset[str]
    tolerance: float

    def are(self, due: WeightPrint) -> bool:
        """Whether the candidate's tensor differs from the reference's and equals `due`, the tensor that folding makes."""
        return due.name in self.wrong and same_weight(due, self.candidate[due.name], self.tolerance)

    def names(self, here: Roles, role: str) -> list[str]:
        """Return the names under which a role's tensor is listed; an unembedding tied to the embedding has its own name."""
        path, embedding = here[role].path, here["embed"].path if "embed" in here else ""
        if path in self.reference and path != embedding:
            return [path]
        copied = self.reference.get(embedding)
        alike = [name for name, item in self.reference.items() if copied and item.sha256 == copied.sha256]
        return [name for name in alike if name != embedding]


def as_folded(
    plan: SidePlan, reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint]
) -> tuple[WeightPrint, ...] | None:
    """Return the fingerprints that a candidate with folded norms should have; None if it has folded no norm.

    A norm counts as folded if its tensor is what folding leaves (gain 1) and at least one projection that reads it differs from
    the checkpoint; then every projection that reads it must be folded. A norm whose tensor was never loaded has the gain 1 too,
    but the projections after it are the checkpoint's. If no projection in the whole model is what folding makes of it, then the
    tensors are wrong and nothing is folded.

    Args:
        plan: the candidate's side: its spec, config and checkpoint.
        reference, candidate: the fingerprints of both sides' live tensors.
    """
    tensors = _Tensors(
        reference={item.name: item for item in reference},
        candidate={item.name: item for item in candidate},
        wrong=frozenset(finding.site for finding in weight_findings(reference, candidate, plan.dtype)[0]),
        tolerance=SKETCH_TOLERANCE[plan.dtype],
    )
    if not tensors.wrong:
        return None
    offset = knob_values(plan.spec, plan.config).get("norm.offset")
    shift = float(offset.value) if offset is not None and isinstance(offset.value, (int, float)) else 0.0
    stored = CheckpointTensors(Path(plan.checkpoint.path))
    due: dict[str, WeightPrint] = {}
    shown = False
    for layer in (None, *range(dims(plan.spec, plan.config)["n_layers"])):
        here = roles(plan.spec, plan.config, layer)
        gains = {tap.path for role, tap in here.items() if role.startswith(GAINS)}
        folded = _folded(here, layer, tensors, shift, stored)
        due |= folded
        shown = shown or any(tensors.are(item) for item in folded.values() if item.name not in gains)
    return tuple(due.get(item.name, item) for item in reference) if shown else None


def folding_findings(
    due: Sequence[WeightPrint], reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint], dtype: str
) -> tuple[list[Finding], list[NotTested]]:
    """Return one finding per tensor that differs from its folded form (`due`, from `as_folded`), and the tensors not compared."""
    findings, unseen = weight_findings(due, candidate, dtype, NOT_AS_FOLDED)
    changed = {finding.site for finding in weight_findings(reference, candidate, dtype)[0]}
    return [one if one.site in changed else _unfolded(one) for one in findings], unseen


def _unfolded(finding: Finding) -> Finding:
    """Reword the finding of a tensor that equals the reference's although a norm should be folded into it."""
    return dataclasses.replace(
        finding, evidence={**finding.evidence, "holds": finding.site, "differs_in": UNFOLDED},
        message=f"tensor {finding.site} of the candidate is not the reference's: {UNFOLDED}",
    )  # fmt: skip


def _folded(
    here: Roles, layer: int | None, tensors: _Tensors, shift: float, stored: CheckpointTensors
) -> dict[str, WeightPrint]:
    """Return the due fingerprints of the folded norms of one block (None: behind the blocks) and of what reads them."""
    made: dict[str, Tensor] = {}
    named: dict[str, str] = {}
    for norm in (norm for norm in READERS if norm in here and (norm == FINAL) == (layer is None)):
        own, readers = here[norm].path, _readers(here, norm)
        listed = {name: here[role].path for role in readers for name in tensors.names(here, role)}
        if own not in tensors.wrong or tensors.wrong.isdisjoint(listed):
            continue
        after = _fold(here, norm, readers, shift, stored, made)
        if own in after and tensors.are(_print(own, after[own])):
            made |= after
            named |= listed | {here[role].path: here[role].path for role in (norm, f"{norm}.bias") if role in here}
    return {name: _print(name, made[path]) for name, path in named.items() if path in made}


def _print(name: str, value: Tensor) -> WeightPrint:
    return fingerprint(name, value.float())


def _readers(here: Roles, norm: str) -> list[str]:
    """Return the roles that read a norm, with their biases; a block with a single norm reads it in both branches."""
    alone = norm == "norm.ln1" and "norm.ln2" not in here
    names = (*READERS[norm], *(READERS["norm.ln2"] if alone else ()))
    return [role for role in here if _reads(role.removesuffix(".bias"), names)]


def _fold(
    here: Roles, norm: str, readers: Sequence[str], shift: float, stored: CheckpointTensors, made: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a norm and of its readers after folding, by path, in float64.

    `made` holds the tensors that folding another norm has already changed; they are used instead of the stored ones.
    """

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
    for role in (role for role in readers if not role.endswith(".bias")):
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
    """Whether a role is one of `readers`, or that role of a numbered expert."""
    name, _, number = role.rpartition(".")
    return role in readers or (number.isdigit() and name in readers)


def _put(whole: Tensor, tap: WeightTap, part: Tensor) -> Tensor:
    """Return a copy of a stored tensor in which the part that `tap` selects is replaced by `part`."""
    flat = whole.flatten().clone()
    flat[laid_out(torch.arange(whole.numel()).view(whole.shape), tap).flatten()] = part.flatten()
    return flat.view(whole.shape)
