"""One side's captures as the formulas read them: its tensors, the checkpoint's, and the values that the spec gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from parity_audit.core.sites import FINAL_NORM, NORM_ROLES, layer_of, local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, f64, spec_value
from parity_audit.diagnose.fit.residuals import Component, Residuals
from parity_audit.formulas.components import IN_BLOCK, OUTSIDE
from parity_audit.formulas.knobs import meant
from parity_audit.formulas.place import Decoder

MASKED_BELOW, FAR_BELOW = torch.finfo(torch.float32).min / 2, 5000.0
"""Scores below the first are masks; and those that are by the second less than the largest of their row: float64 ends at e^-745."""
OF_THE_LENGTH = ("pos_embed", "rot_q", "rot_k", "z", "delta.out")
"""Sites at which a long text shows what a short one cannot: windows, positions and states that a program loses."""
ENTERING = ("ln1.out", "ln2.out")
"""The outputs of norms that a block's projections read."""
MATRICES = ("attn_scores", "pattern")
HIDDEN_ALIKE = (*MATRICES, *ENTERING, FINAL_NORM)
"""Sites that programs fuse into what reads them: where one side does not show such a site, neither side's is read."""
ByLayer = Mapping["int | None", Evidence]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side beside the formulas. `eps` is the step of the dtype that a component is computed in."""

    residuals: Residuals
    probes: tuple[Probe, ...]
    evidence: ByLayer

    def shown(self, site: str) -> list[Component]:
        """The site in every probe that captures it; of probes with all sites where there are such, and those of a long text where
        the site depends on the length."""
        seen = [probe for probe in self.probes if self._tensor(probe.name, site) is not None]
        wide = [probe for probe in seen if probe.sites == "all"]
        long = [probe for probe in seen if probe.sites != "all"] if local_name(site) in OF_THE_LENGTH else []
        return [Component(probe=probe, site=site) for probe in [*wide, *long] or seen]

    def eps(self, component: Component) -> float:
        """The relative step of the dtype that a component was computed in, as far as the run or its capture says."""
        tensor = self._tensor(component.probe.name, component.site)
        said = next(iter(self.evidence.values())).dtype
        dtypes = [*([getattr(torch, said)] if said else []), *([tensor.dtype] if tensor is not None else [])]
        return max((float(torch.finfo(dtype).eps) for dtype in dtypes if dtype.is_floating_point), default=0.0)

    def _tensor(self, probe: str, site: str) -> Tensor | None:
        return tensor_at(self.evidence, probe, site)


def tensor_at(evidence: ByLayer, probe: str, site: str) -> Tensor | None:
    """A captured tensor by the whole name of its site."""
    layer = layer_of(site)
    own = evidence.get(layer)
    return None if own is None else own.tensor(probe, site if layer is None else local_name(site))


def as_shown_by(own: ByLayer, other: ByLayer) -> ByLayer:
    """One side without the attention matrices and norms that the other hides: what both make of what is before them is then judged
    by what reads them, alike on both sides. A norm that departs on the side that shows it would else explain nothing there."""

    def of_layer(layer: int | None) -> Evidence:
        @cache
        def hides(probe: str, site: str) -> bool:
            return layer not in other or other[layer].tensor(probe, site) is None

        def tensor(probe: str, site: str) -> Tensor | None:
            return None if site in HIDDEN_ALIKE and hides(probe, site) else own[layer].tensor(probe, site)

        return replace(own[layer], tensor=tensor)

    return {layer: of_layer(layer) for layer in own}


def with_norms(own: ByLayer) -> ByLayer:
    """One side with what enters a block's projections where its capture does not show that: as the spec's values make it of what is
    shown before it."""
    residuals = side_of(own).residuals

    def of_layer(layer: int | None) -> Evidence:
        probes = {probe.name: probe for probe in own[layer].probes}

        def tensor(probe: str, site: str) -> Tensor | None:
            found = own[layer].tensor(probe, site)
            if found is not None or site not in ENTERING or own[layer].weight(NORM_ROLES[site]) is None:
                return found
            return residuals.made(Component(probe=probes[probe], site=f"blocks.{layer}.{site}"))

        return replace(own[layer], tensor=cache(tensor))

    return {layer: of_layer(layer) for layer in own}


def _is_masked(scores: Tensor) -> Tensor:
    """True where a score is a mask: programs write -inf, their dtype's least number, or what is so low that e^s is 0."""
    return (scores < MASKED_BELOW) | (scores < scores.amax(-1, keepdim=True) - FAR_BELOW)


def side_of(evidence: ByLayer) -> Side:
    """The side whose evidence this is."""
    first = next(iter(evidence.values()))

    @lru_cache
    def captured(probe: str, site: str) -> Tensor | None:
        found = tensor_at(evidence, probe, site)
        if found is None or not site.endswith("attn_scores"):
            return None if found is None else f64(found)
        return f64(found).masked_fill(_is_masked(f64(found)), -torch.inf)

    @lru_cache
    def weights(layer: int | None, role: str) -> Tensor | None:
        found = evidence[layer].weight(role)
        return evidence[None].weight(role) if found is None and layer is not None and None in evidence else found

    layers = range(first.dims["n_layers"])
    values = {knob: [meant(knob, spec_value(first.knobs, knob, layer)) for layer in layers] for knob in first.knobs}
    decoder = Decoder(dims=first.dims, values=values, weights=weights, dtype=torch.float64)
    return Side(residuals=Residuals(decoder=decoder, captured=captured), probes=first.probes, evidence=evidence)


def inputs_of_sites(evidence: ByLayer) -> Callable[[str], frozenset[str]]:
    """What the formula of a site reads: a function from a site to the sites before it, whether a capture shows them or not."""
    side = side_of(evidence)
    probe = next((probe for probe in side.probes if probe.sites == "all"), side.probes[0])
    return cache(lambda site: side.residuals.read_by(Component(probe=probe, site=site)))


def sites_with_formula(evidence: ByLayer) -> list[str]:
    """Every site that a formula makes, outside the blocks and in each block, in the order in which data flow."""
    blocks = [layer for layer in evidence if layer is not None]
    before = [site for site in OUTSIDE if site in ("embed", "pos_embed", "embed_ln.out")]
    after = [site for site in OUTSIDE if site in ("ln_final.out", "logits")]
    return [*before, *(f"blocks.{layer}.{site}" for layer in sorted(blocks) for site in IN_BLOCK), *after]
