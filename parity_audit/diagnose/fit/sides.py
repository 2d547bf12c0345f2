"""One side's captures as the formulas read them: its tensors, the checkpoint's, and the values that the spec gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, f64, spec_value
from parity_audit.diagnose.fit.residuals import HELD, Component, Residuals
from parity_audit.formulas.components import IN_BLOCK, OUTSIDE
from parity_audit.formulas.place import Decoder

ByLayer = Mapping["int | None", Evidence]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side beside the formulas. `eps` is the step of the dtype that a component is computed in."""

    residuals: Residuals
    probes: tuple[Probe, ...]
    evidence: ByLayer

    def shown(self, site: str) -> list[Component]:
        """The site in every probe that captures it; of probes with all sites where there are such."""
        seen = [probe for probe in self.probes if self._tensor(probe.name, site) is not None]
        wide = [probe for probe in seen if probe.sites == "all"]
        return [Component(probe=probe, site=site) for probe in wide or seen]

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


def side_of(evidence: ByLayer) -> Side:
    """The side whose evidence this is."""
    first = next(iter(evidence.values()))

    @lru_cache(HELD)
    def captured(probe: str, site: str) -> Tensor | None:
        found = tensor_at(evidence, probe, site)
        return None if found is None else f64(found)

    def weights(layer: int | None, role: str) -> Tensor | None:
        found = evidence[layer].weight(role)
        return evidence[None].weight(role) if found is None and layer is not None and None in evidence else found

    layers = range(first.dims["n_layers"])
    values = {knob: [spec_value(first.knobs, knob, layer) for layer in layers] for knob in first.knobs}
    decoder = Decoder(dims=first.dims, values=values, weights=weights, dtype=torch.float64)
    return Side(residuals=Residuals(decoder=decoder, captured=captured), probes=first.probes, evidence=evidence)


def sites_with_formula(evidence: ByLayer) -> list[str]:
    """Every site that a formula makes, outside the blocks and in each block, in the order in which data flow."""
    blocks = [layer for layer in evidence if layer is not None]
    before = [site for site in OUTSIDE if site in ("embed", "pos_embed", "embed_ln.out")]
    after = [site for site in OUTSIDE if site in ("ln_final.out", "logits")]
    return [*before, *(f"blocks.{layer}.{site}" for layer in sorted(blocks) for site in IN_BLOCK), *after]
