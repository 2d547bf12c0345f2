"""The captures of one side as the formulas read them: its tensors, those of the checkpoint, and the values of the
spec."""

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
"""A score counts as masked if it is below the first number, or below the largest score of its row by more than the
second: e^-745 is the smallest power of e above 0 in float64."""
OF_THE_LENGTH = ("pos_embed", "rot_q", "rot_k", "z", "delta.out")
"""Sites at which a long text can show errors that a short one cannot: of windows, positions, and states that a
program loses."""
ENTERING = ("ln1.out", "ln2.out")
"""The outputs of norms that the projections of a block read."""
MATRICES = ("attn_scores", "pattern")
HIDDEN_ALIKE = (*MATRICES, *ENTERING, FINAL_NORM)
"""Sites that programs may fuse with the operation that reads them. If one side does not show such a site, it is read
on neither side."""
ByLayer = Mapping["int | None", Evidence]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side and its residuals against the formulas."""

    residuals: Residuals
    probes: tuple[Probe, ...]
    evidence: ByLayer

    def shown(self, site: str) -> list[Component]:
        """Return the site in every probe that captures it.

        Where there are probes that capture all sites, only these are returned, and the long texts at sites that depend
        on the length.
        """
        seen = [probe for probe in self.probes if self._tensor(probe.name, site) is not None]
        wide = [probe for probe in seen if probe.sites == "all"]
        long = [probe for probe in seen if probe.sites != "all"] if local_name(site) in OF_THE_LENGTH else []
        return [Component(probe=probe, site=site) for probe in [*wide, *long] or seen]

    def eps(self, component: Component) -> float:
        """Return the relative step of the dtype in which a component was computed: the coarser of the dtype of the
        run, where it is known, and that of the captured tensor."""
        tensor = self._tensor(component.probe.name, component.site)
        said = next(iter(self.evidence.values())).dtype
        dtypes = [*([getattr(torch, said)] if said else []), *([tensor.dtype] if tensor is not None else [])]
        return max((float(torch.finfo(dtype).eps) for dtype in dtypes if dtype.is_floating_point), default=0.0)

    def _tensor(self, probe: str, site: str) -> Tensor | None:
        return tensor_at(self.evidence, probe, site)


def tensor_at(evidence: ByLayer, probe: str, site: str) -> Tensor | None:
    """Return a captured tensor by the full name of its site."""
    layer = layer_of(site)
    own = evidence.get(layer)
    return None if own is None else own.tensor(probe, site if layer is None else local_name(site))


def as_shown_by(own: ByLayer, other: ByLayer) -> ByLayer:
    """Return the evidence of one side without the attention matrices and norm outputs that the other side does not
    show.

    Their computation is then judged on both sides by the sites that read them. Otherwise an error in a norm that one
    side alone shows would not be found: the norm's own site cannot be compared, and the sites that read it are computed
    from its captured output.
    """

    def of_layer(layer: int | None) -> Evidence:
        @cache
        def hides(probe: str, site: str) -> bool:
            return layer not in other or other[layer].tensor(probe, site) is None

        def tensor(probe: str, site: str) -> Tensor | None:
            return None if site in HIDDEN_ALIKE and hides(probe, site) else own[layer].tensor(probe, site)

        return replace(own[layer], tensor=tensor)

    return {layer: of_layer(layer) for layer in own}


def with_norms(own: ByLayer) -> ByLayer:
    """Return the evidence of one side with the norm outputs that a block's projections read, computed where they are
    not captured.

    They are computed under the spec's values from the captured sites before them.
    """
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
    """Return True where a score is masked: programs write -inf, the lowest number of their dtype, or a number so low
    that e^s is 0."""
    return (scores < MASKED_BELOW) | (scores < scores.amax(-1, keepdim=True) - FAR_BELOW)


def side_of(evidence: ByLayer) -> Side:
    """Return the `Side` that this evidence belongs to."""
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
    """Return a function from a site to the sites that its formula reads under the spec's values, captured or not."""
    side = side_of(evidence)
    probe = next((probe for probe in side.probes if probe.sites == "all"), side.probes[0])
    return cache(lambda site: side.residuals.read_by(Component(probe=probe, site=site)))


def sites_with_formula(evidence: ByLayer) -> list[str]:
    """Return every site that has a formula, outside the blocks and in each block, in the order of the data flow."""
    blocks = [layer for layer in evidence if layer is not None]
    before = [site for site in OUTSIDE if site in ("embed", "pos_embed", "embed_ln.out")]
    after = [site for site in OUTSIDE if site in ("ln_final.out", "logits")]
    return [*before, *(f"blocks.{layer}.{site}" for layer in sorted(blocks) for site in IN_BLOCK), *after]
