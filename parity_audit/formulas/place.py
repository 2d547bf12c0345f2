"""Everything that the formula of a component may ask for: its inputs, tensors of the checkpoint, knob values, and the batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.formulas.choices import MISSING, OF_SECOND_WITHIN, TIMES_OWN, number_in
from parity_audit.formulas.knobs import default, name_in_spec

Weights = Callable[[int | None, str], Tensor | None]
Values = Mapping[str, Sequence[Any]]


class MissingTensor(ValueError):
    """The knob values need a tensor that the checkpoint does not hold."""


class MissingTokens(ValueError):
    """The knob values need tokens that are not computed in this run, or padding, which programs treat differently."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a run: token ids, a mask that is 1 at real tokens, and positions, each `[batch pos]`.

    Tokens from the place `decoded_from` on were decoded from a cache, the first `at_once` of them in one decode step; None means
    that the run used no cache.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    decoded_from: int | None = None
    at_once: int = 1
    shown: Tensor | None = None
    """The places `[pos]` of tokens that are taken out of a longer text and computed each by itself; None if the whole row is."""
    masks: dict[Hashable, tuple[Tensor, Tensor | None]] = field(default_factory=dict, init=False, compare=False)
    """Attention masks of this batch that were computed already, each with the queries that see no key; filled by `in_attention`."""

    @property
    def steps(self) -> list[int]:
        """The number of tokens in each step of the run, in order: the prefill, then the decode steps."""
        length, first = self.tokens.shape[1], self.decoded_from
        if first is None:
            return [length]
        together = min(self.at_once, length - first)
        return [first, together, *[1] * (length - first - together)]

    @property
    def places(self) -> Tensor:
        """The place of each token in its row, counted with padding, `[batch pos]`."""
        own = torch.arange(self.mask.shape[1], device=self.mask.device) if self.shown is None else self.shown
        return own.expand_as(self.positions)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder's sizes, knob values and tensors.

    `values` has one value per layer for each knob; outside the blocks, the first value applies. `weights(layer, role)` returns a
    tensor of the checkpoint as it is stored, or None if it holds none; `layer` is None outside the blocks. Everything is computed in
    `dtype`.
    """

    dims: Mapping[str, int]
    values: Values
    weights: Weights
    dtype: torch.dtype = torch.float64

    def knob(self, name: str, layer: int | None) -> Any:
        """Return a knob's value in a layer, or its default if it is not given.

        Norms of queries and keys take the value of the same knob of the other norms if they have none of their own.
        """
        said = name_in_spec(name, self.values)
        return default(name) if said is None else self.values[said][layer or 0]


@dataclass(kw_only=True)
class Dependencies:
    """The record of what a site's formula, and the formulas of the sites that it read, depend on.

    - `asked`: the knobs whose values were asked for.
    - `besides`: further knobs whose value or presence changes the result.
    - `read`: the sites that the site's own formula read.
    - `undefined`: masks `[batch pos]` of tokens whose attention is undefined, because programs do not agree on it, by identity.
    """

    asked: set[str] = field(default_factory=set)
    besides: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    undefined: dict[int, Tensor] = field(default_factory=dict)

    def add(self, other: Dependencies) -> None:
        """Add the record of a site that this formula read, except the sites that it read."""
        self.asked |= other.asked
        self.besides |= other.besides
        self.undefined |= other.undefined


@dataclass(frozen=True, kw_only=True)
class FormulaContext:
    """One block of a run, or the part outside the blocks (`layer` None), as its formulas see it."""

    layer: int | None
    decoder: Decoder
    batch: Batch
    site: Callable[[str], Tensor]
    """Returns the tensor of a site, by its name in the block ("q") or by its whole name."""
    is_given: Callable[[str], bool]
    """Whether a site's tensor is given, was read already, or will be asked for whole by the caller."""
    took: Dependencies
    """The record of what the formula of the site asks for, filled while it is computed."""
    block: Callable[[int, Tensor], Tensor]
    """Returns the output of the block with this number for an input stream `[batch pos d_model]`."""
    queries: Tensor | None = None
    """The places of the queries whose attention is computed; None for all of them."""

    def knob(self, name: str) -> Any:
        """Return a knob's value in this layer, and record that it was asked for."""
        self.took.asked.add(name)
        return self.decoder.knob(name, self.layer)

    def says(self, name: str) -> bool:
        """Whether the decoder's values give a knob, whatever its value is."""
        self.took.besides.add(name)
        return name in self.decoder.values

    def entering(self) -> Tensor:
        """Return the stream that this block computes on, `[batch pos d_model]`.

        If the block runs twice, and all but the input of its second run is captured, this is the output of the first run.
        """
        stream = self.site("resid_pre")
        return self.block(self.layer or 0, stream) if self.knob("residual.repeated") == OF_SECOND_WITHIN else stream

    def whole_steps(self) -> list[int]:
        """Return the number of tokens in each step. Raises MissingTokens if only some of the tokens are computed in this run."""
        if self.queries is not None or self.batch.shown is not None:
            raise MissingTokens("what a step reads in another order needs all of its tokens")
        return self.batch.steps

    def dim(self, name: str) -> int:
        """Return a size of the decoder by its name, for example d_model, n_heads, d_head or n_layers."""
        return self.decoder.dims[name]

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds the tensor of a role."""
        return self.decoder.weights(self.layer, role) is not None

    def weight(self, role: str) -> Tensor | None:
        """Return a tensor of the checkpoint in the dtype of the computation, or None if it holds none."""
        return self.tensor(role) if self.has(role) else None

    def tensor(self, role: str) -> Tensor:
        """Return a tensor of the checkpoint in the dtype of the computation. Raises MissingTensor if it holds none."""
        return self.stored(role).to(dtype=self.decoder.dtype)

    def multiple(self, role: str, said: object) -> Tensor | None:
        """Return a tensor of the checkpoint, a multiple of it, or None, as the value `said` of a knob demands."""
        found = None if said == MISSING else self.weight(role)
        times = number_in(said, TIMES_OWN)
        return found if found is None or times is None else times * found

    def stored(self, role: str) -> Tensor:
        """Return a tensor of the checkpoint in its stored dtype, so that callers convert only parts of large tables.

        Raises MissingTensor if the checkpoint holds none.
        """
        found = self.decoder.weights(self.layer, role)
        if found is None:
            where = "outside the blocks" if self.layer is None else f"in layer {self.layer}"
            raise MissingTensor(f"the checkpoint has no `{role}` {where}")
        return found.to(self.batch.tokens.device)
