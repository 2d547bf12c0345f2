"""A whole decoder as formulas: each site is computed from the sites before it, the checkpoint's tensors and the knobs.

When a component asks for an input, it gets the given tensor of that site (from a capture) if there is one, and otherwise the tensor
that the formulas compute. So the same functions compute one component from a program's own inputs, or the whole model from token
ids. Which knobs a component asks for is recorded while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from parity_audit.core.sites import BEFORE_BLOCKS, LEAVES_BLOCK, LOGITS, layer_of, local_name
from parity_audit.core.types import DecoderFacts
from parity_audit.formulas.components import IN_BLOCK, OUTSIDE, sites_of
from parity_audit.formulas.in_altup import has_streams
from parity_audit.formulas.place import Batch, Decoder, Dependencies, FormulaContext, Values
from parity_audit.formulas.site_cache import ComputedSite, SiteCache
from parity_audit.formulas.stored import Stored, role_tensor

Given = Callable[[str], Tensor | None]


def decoder_of(facts: DecoderFacts, stored: Stored, dtype: torch.dtype, values: Values | None = None) -> Decoder:
    """Return the decoder that a spec describes, with the tensors of a checkpoint; `values` replace the spec's knob values."""

    def weights(layer: int | None, role: str) -> Tensor | None:
        own = facts.outside if layer is None or role in facts.outside else facts.blocks[layer]
        return role_tensor(stored, own, role, tied=facts.tied)

    return Decoder(dims=facts.dims, values=facts.values if values is None else values, weights=weights, dtype=dtype)


def nothing(site: str) -> Tensor | None:
    """Return None for every site, so that everything is computed from the token ids."""
    return None


@dataclass(kw_only=True)
class Run:
    """The run of one batch through a decoder. A site is computed when it is asked for first, and kept until `forget` drops it.

    - `given(site)`: the tensor that replaces the computed one as input of all later sites; None if there is none.
    - `shown`: the sites that the caller will ask for. Attention matrices that are not among them are never held whole: they are
      computed for some queries at a time.
    - `queries`: the only queries whose attention is computed (None: all); all sites computed from it have these positions only.
    - `kept`: tensors of sites that other runs with the same batch, given tensors and checkpoint computed. `alike` is the name of
      this combination.
    - `took`: the knobs that were asked for so far, and the tokens whose attention is undefined because a mask hides every key.
    """

    decoder: Decoder
    batch: Batch
    given: Given = nothing
    shown: frozenset[str] = frozenset()
    queries: Tensor | None = None
    kept: SiteCache | None = None
    alike: str = ""
    took: Dependencies = field(default_factory=Dependencies)
    _computed: dict[str, ComputedSite] = field(default_factory=dict)
    _going_on: dict[str, Tensor] = field(default_factory=dict)

    def sites(self) -> list[str]:
        """Return every site that this decoder has, in the order in which data flow."""
        before = {"pos_embed": "pos_embed", "embed_ln.out": "norm.embed_ln"}
        outside = self._place(None)
        first = [site for site in BEFORE_BLOCKS if site not in before or outside.has(before[site])]
        blocks = [
            f"blocks.{layer}.{site}"
            for layer in range(self.decoder.dims["n_layers"])
            for site in sites_of(self._place(layer))
        ]
        behind = ["altup.combined"] if has_streams(outside) else []
        return [*first, *blocks, *behind, "ln_final.out", LOGITS]

    def computed(self, site: str) -> Tensor:
        """Return the tensor that the formulas compute for a site from its inputs, even if a tensor is given for the site itself.

        Raises:
            MissingTensor: the knob values need a tensor that the checkpoint does not hold.
        """
        if site not in self._computed:
            found = None if self.kept is None else self.kept.found((self.alike, site), self.decoder.values)
            self._computed[site] = self._made(site) if found is None else found
        self.took.add(self._computed[site].took)
        return self._computed[site].tensor

    @property
    def read(self) -> dict[str, set[str]]:
        """The sites that the formula of each computed site asked for, by computed site."""
        return {site: made.took.read for site, made in self._computed.items()}

    def tensor(self, site: str) -> Tensor:
        """Return the tensor that later sites read from a site: the given one if there is one, else the computed one."""
        if site not in self._going_on:
            found = self.given(site)
            self._going_on[site] = self.computed(site) if found is None else found
        elif site in self._computed and self._going_on[site] is self._computed[site].tensor:
            self.took.add(self._computed[site].took)
        return self._going_on[site]

    def forget(self, before: int) -> None:
        """Drop all tensors of the blocks before this one, except the stream that leaves the last of them."""
        kept = {f"blocks.{before - 1}.{name}" for name in LEAVES_BLOCK}
        made = {*self._computed, *self._going_on}
        for site in (site for site in made if (layer_of(site) or 0) < before and site not in kept):
            self._computed.pop(site, None)
            self._going_on.pop(site, None)

    def _made(self, site: str) -> ComputedSite:
        """Compute a site; the knobs and sites that its formula asked for are recorded even if it raises an error."""
        layer, outer = layer_of(site), self.took
        make = OUTSIDE[site] if layer is None else IN_BLOCK[local_name(site)]
        self.took = own = Dependencies()
        try:
            made = ComputedSite(tensor=make(self._place(layer)), took=own)
        finally:
            self.took = outer
            outer.add(own)
        if self.kept is not None:
            self.kept.keep((self.alike, site), made, self.decoder.values)
        return made

    def _place(self, layer: int | None) -> FormulaContext:
        return FormulaContext(
            layer=layer, decoder=self.decoder, batch=self.batch, site=partial(self._site, layer, self.took),
            is_given=partial(self._is_given, layer), took=self.took, block=self._block, queries=self.queries,
        )  # fmt: skip

    def _block(self, layer: int, stream: Tensor) -> Tensor:
        """Return the output of a block for another input stream than its own, with no site inside the block given."""
        block = f"blocks.{layer}."
        once = {name: value for name, value in self.decoder.values.items() if name != "residual.repeated"}
        again = Run(
            decoder=replace(self.decoder, values=once), batch=self.batch, given={f"{block}resid_pre": stream}.get
        )
        made = again.computed(f"{block}resid_post")
        self.took.besides |= again.took.asked | again.took.besides
        return made

    def _site(self, layer: int | None, took: Dependencies, site: str) -> Tensor:
        took.read.add(_whole_name(layer, site))
        return self.tensor(_whole_name(layer, site))

    def _is_given(self, layer: int | None, site: str) -> bool:
        name = _whole_name(layer, site)
        return name in self.shown or name in self._going_on or self.given(name) is not None


def _whole_name(layer: int | None, site: str) -> str:
    """Return a site's name with its block in front if the name is relative to a block."""
    return f"blocks.{layer}.{site}" if layer is not None and site in IN_BLOCK else site
