"""Check that `attn_out` and `mlp_out` show what is added to the residual stream, in every backend.

    resid_mid  = resid_pre + attn_out
    resid_post = resid_mid + mlp_out
    resid_post = resid_pre + attn_out + mlp_out        where a block has no resid_mid (parallel blocks)
    altup.activated = resid_mid + mlp_out              where a block has several streams (and then none of the above)

If a block adds embeddings of its own for each token (`per_layer.out`), they are a term of its last sum. If the
checkpoint stores a number for the block, that number multiplies the last sum.

A sum is rounded once, so its two sides may differ by a few eps of the largest term. A larger difference means that a
hook shows another tensor (before a post-norm, before a multiplier) or that the port adds another tensor. This concerns
the meaning of the hook and by itself says nothing about the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parity_audit.capture.session import SidePlan
from parity_audit.compare.floor import dtype_eps
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.core.sites import layer_of
from parity_audit.core.types import Probe
from parity_audit.formulas.stored import CheckpointTensors, role_tensor
from parity_audit.specs.view import dims, roles

ROUNDINGS = 2.0
"""Roundings of the dtype by which a sum of two or three tensors may be off."""
Sums = tuple[tuple[str, tuple[str, ...]], ...]
SEQUENTIAL: Sums = (("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out")))
LAST, OWN, SCALAR = "resid_post", "per_layer.out", "residual.scalar"
STREAMS: Sums = (("altup.activated", ("resid_mid", "mlp_out")),)
OF_STREAMS = ("altup.pre", "altup.active", "laurel.out")
"""Sites that show that a block has several streams, or a low-rank residual (`laurel.out`): its other sums are scaled."""
WHOLE: Sums = (("resid_post", ("resid_pre", "attn_out", "mlp_out")),)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """In one block, `total` is the sum of `terms`; a violation is reported about the last term."""

    layer: int
    total: str
    terms: tuple[str, ...]


def identities(sites: set[str]) -> Iterator[Identity]:
    """Yield the sums that a capture with these sites can check."""
    for layer in sorted({layer for site in sites if (layer := layer_of(site)) is not None}):
        for total, terms in _sums(sites, layer):
            if total == LAST and _has(sites, layer, OWN):
                terms = (*terms, OWN)
            if _has(sites, layer, total, *terms):
                yield Identity(layer=layer, total=total, terms=terms)


def _sums(sites: set[str], layer: int) -> Sums:
    """The sums that hold in a block with these sites."""
    if any(_has(sites, layer, name) for name in OF_STREAMS):
        return STREAMS
    return SEQUENTIAL if _has(sites, layer, "resid_mid") else WHOLE


def _has(sites: set[str], layer: int, *names: str) -> bool:
    return all(f"blocks.{layer}.{name}" in sites for name in names)


@one_thread()
def hook_warnings(
    capture: TensorSource, side: str, dtype: str, factors: Mapping[int, float] | None = None
) -> list[str]:
    """One warning per sum that does not add up, with its layers and the size of the difference.

    `factors` is the number that multiplies a block's last sum, as from `stored_factors`.
    """
    broken: dict[tuple[str, tuple[str, ...]], dict[int, float]] = {}
    for probe in capture.probes:
        if probe.sites != "all":
            continue
        for identity in identities(capture.sites(probe.name)):
            share = violation(capture, probe, identity, (factors or {}).get(identity.layer, 1.0))
            if share > ROUNDINGS * dtype_eps(dtype):
                layers = broken.setdefault((identity.total, identity.terms), {})
                layers[identity.layer] = max(share, layers.get(identity.layer, 0.0))
    return [_line(side, total, terms, layers) for (total, terms), layers in broken.items()]


def stored_factors(plan: SidePlan) -> dict[int, float]:
    """The number by which the checkpoint multiplies a block's last sum, by layer; empty if the architecture has none."""
    if SCALAR not in plan.spec.content.roles:
        return {}
    stored, layers = CheckpointTensors(Path(plan.checkpoint.path)), range(dims(plan.spec, plan.config)["n_layers"])
    found = {layer: role_tensor(stored, roles(plan.spec, plan.config, layer), SCALAR, tied=False) for layer in layers}
    return {layer: float(number) for layer, number in found.items() if number is not None}


def violation(capture: TensorSource, probe: Probe, identity: Identity, factor: float = 1.0) -> float:
    """The error of a sum: rms(total / factor - sum of terms), relative to the largest rms of these tensors.

    Only real positions count. `factor` applies to a block's last sum only.
    """
    keep = torch.tensor(probe.mask, dtype=torch.bool)
    names = [f"blocks.{identity.layer}.{name}" for name in (identity.total, *identity.terms)]
    rows = min(capture.shape(probe.name, name)[1] for name in names)
    total, *terms = [capture.rows(probe.name, name, 0, rows)[keep[:, :rows]].double() for name in names]
    total = total / factor if identity.total == LAST else total
    largest = max(float(tensor.square().mean().sqrt()) for tensor in (total, *terms))
    apart = float((total - torch.stack(terms).sum(0)).square().mean().sqrt())
    return apart / largest if largest > 0 else 0.0


def _line(side: str, total: str, terms: Sequence[str], layers: dict[int, float]) -> str:
    worst = max(layers.values())
    places = ", ".join(map(str, sorted(layers)))
    return (
        f"{side}: {total} is not {' + '.join(terms)} in layer{'s' if len(layers) > 1 else ''} {places} "
        f"(apart by {worst:.2g} of its size): {terms[-1]} is not what is added, or the hook means something else"
    )
