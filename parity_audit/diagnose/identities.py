"""Do hooks mean what they say? `attn_out` and `mlp_out` are what is added to the residual stream, in every backend.

    resid_mid  = resid_pre + attn_out
    resid_post = resid_mid + mlp_out
    resid_post = resid_pre + attn_out + mlp_out        where a block has no resid_mid (parallel blocks)

A sum is rounded once, so the two sides may be apart by a few eps of the largest term and no more. What is beyond that
is a hook that shows something else (before a post-norm, before a multiplier) or a port that adds something else:
a matter of meaning, which by itself says nothing about the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from parity_audit.compare.floor import dtype_eps
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.core.sites import layer_of
from parity_audit.core.types import Probe

ROUNDINGS = 2.0
Sums = tuple[tuple[str, tuple[str, ...]], ...]
SEQUENTIAL: Sums = (("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out")))
WHOLE: Sums = (("resid_post", ("resid_pre", "attn_out", "mlp_out")),)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """`total` is the sum of `terms`, in one block; the last term is the one that a violation is about."""

    layer: int
    total: str
    terms: tuple[str, ...]


def identities(sites: set[str]) -> Iterator[Identity]:
    """The sums that a capture of these sites can check."""
    for layer in sorted({layer for site in sites if (layer := layer_of(site)) is not None}):
        for total, terms in SEQUENTIAL if _has(sites, layer, "resid_mid") else WHOLE:
            if _has(sites, layer, total, *terms):
                yield Identity(layer=layer, total=total, terms=terms)


def _has(sites: set[str], layer: int, *names: str) -> bool:
    return all(f"blocks.{layer}.{name}" in sites for name in names)


@one_thread()
def hook_warnings(capture: TensorSource, side: str, dtype: str) -> list[str]:
    """One line per sum that does not add up, with its layers and by how much."""
    broken: dict[tuple[str, tuple[str, ...]], dict[int, float]] = {}
    for probe in capture.probes:
        if probe.sites != "all":
            continue
        for identity in identities(capture.sites(probe.name)):
            share = violation(capture, probe, identity)
            if share > ROUNDINGS * dtype_eps(dtype):
                layers = broken.setdefault((identity.total, identity.terms), {})
                layers[identity.layer] = max(share, layers.get(identity.layer, 0.0))
    return [_line(side, total, terms, layers) for (total, terms), layers in broken.items()]


def violation(capture: TensorSource, probe: Probe, identity: Identity) -> float:
    """rms(total - sum of terms) at real positions, over the rms of the largest of them."""
    keep = torch.tensor(probe.mask, dtype=torch.bool)
    names = [f"blocks.{identity.layer}.{name}" for name in (identity.total, *identity.terms)]
    rows = min(capture.shape(probe.name, name)[1] for name in names)
    total, *terms = [capture.rows(probe.name, name, 0, rows)[keep[:, :rows]].double() for name in names]
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
