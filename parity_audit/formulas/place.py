"""What a component of a decoder may ask for: its inputs, tensors of the checkpoint, knob values, and the batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.formulas.choices import MISSING, OF_SECOND_WITHIN, TIMES_OWN, number_in
from parity_audit.formulas.knobs import default, said_by

Weights = Callable[[int | None, str], Tensor | None]
Values = Mapping[str, Sequence[Any]]


class MissingTensor(ValueError):
    """The values ask for a tensor that the checkpoint does not hold."""


class MissingTokens(ValueError):
    """The values ask for tokens that are not computed here, or of which programs do not agree."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a run is given: token ids, a mask that is 1 at real tokens, and positions, each `[batch pos]`; and the place from which
    on tokens were decoded from a cache, the first `at_once` of them in one step; None where the run was whole."""

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    decoded_from: int | None = None
    at_once: int = 1
    shown: Tensor | None = None
    """The places in their row `[pos]` of tokens that are computed each by itself, out of a longer text; None of a whole row."""
    masks: dict[Hashable, tuple[Tensor, Tensor | None]] = field(default_factory=dict, init=False, compare=False)
    """Which keys some of its queries see, and which of them see none: kept by the formulas of attention, for this batch alone."""

    @property
    def steps(self) -> list[int]:
        """How many tokens each step of the run computes, in their order."""
        length, first = self.tokens.shape[1], self.decoded_from
        if first is None:
            return [length]
        together = min(self.at_once, length - first)
        return [first, together, *[1] * (length - first - together)]

    @property
    def places(self) -> Tensor:
        """The place of each token in its row, padding counted, `[batch pos]`."""
        own = torch.arange(self.mask.shape[1], device=self.mask.device) if self.shown is None else self.shown
        return own.expand_as(self.positions)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder's sizes, knob values and tensors.

    `values` has one value per layer for each knob; outside the blocks the first one holds. `weights(layer, role)` is a
    tensor of the checkpoint as it is stored, None where it holds none; `layer` is None outside the blocks. Everything is
    computed in `dtype`.
    """

    dims: Mapping[str, int]
    values: Values
    weights: Weights
    dtype: torch.dtype = torch.float64

    def knob(self, name: str, layer: int | None) -> Any:
        """The value in a layer; norms of queries and keys are as the other norms where nothing else is said."""
        said = said_by(name, self.values)
        return default(name) if said is None else self.values[said][layer or 0]


@dataclass(kw_only=True)
class Took:
    """What a formula took, and the formulas of the sites that it read: the knobs that were `asked` for, those whose values or
    presence decide `besides`, the sites that it `read` itself, and, by their identity, tokens `[batch pos]` for which it says what
    programs do not agree on."""

    asked: set[str] = field(default_factory=set)
    besides: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    undefined: dict[int, Tensor] = field(default_factory=dict)

    def add(self, other: Took) -> None:
        """Take as well what the formula of a site took that is read here."""
        self.asked |= other.asked
        self.besides |= other.besides
        self.undefined |= other.undefined


@dataclass(frozen=True, kw_only=True)
class Place:
    """One block of a run, or what lies outside the blocks (`layer` None)."""

    layer: int | None
    decoder: Decoder
    batch: Batch
    site: Callable[[str], Tensor]
    """The tensor of a site: relative to the block ("q") in a block, else by its whole name."""
    is_given: Callable[[str], bool]
    """Whether a site's tensor is there already, or will be asked for whole."""
    took: Took
    """What the formula of a site takes, noted while it is computed."""
    block: Callable[[int, Tensor], Tensor]
    """What a block, by its number, makes of a stream `[batch pos d_model]`."""
    queries: Tensor | None = None
    """The places of the queries whose attention is computed, None for all of them."""

    def knob(self, name: str) -> Any:
        """A knob's value here."""
        self.took.asked.add(name)
        return self.decoder.knob(name, self.layer)

    def says(self, name: str) -> bool:
        """Whether anything is said of a knob, whatever it is."""
        self.took.besides.add(name)
        return name in self.decoder.values

    def entering(self) -> Tensor:
        """The stream that this block works on, `[batch pos d_model]`."""
        stream = self.site("resid_pre")
        return self.block(self.layer or 0, stream) if self.knob("residual.repeated") == OF_SECOND_WITHIN else stream

    def whole_steps(self) -> list[int]:
        """How many tokens each step has. Raises MissingTokens where some of them are not computed here."""
        if self.queries is not None or self.batch.shown is not None:
            raise MissingTokens("what a step reads in another order needs all of its tokens")
        return self.batch.steps

    def dim(self, name: str) -> int:
        """A size of the decoder: d_model, n_heads, d_head, n_layers ..."""
        return self.decoder.dims[name]

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds the tensor of a role."""
        return self.decoder.weights(self.layer, role) is not None

    def weight(self, role: str) -> Tensor | None:
        """A tensor of the checkpoint in the dtype to compute in, None where it holds none."""
        return self.tensor(role) if self.has(role) else None

    def tensor(self, role: str) -> Tensor:
        """The same of a tensor that has to be there. Raises MissingTensor."""
        return self.stored(role).to(dtype=self.decoder.dtype)

    def multiple(self, role: str, said: object) -> Tensor | None:
        """A tensor of which a program may have a multiple, as is said: the checkpoint's, so many times it, or none."""
        found = None if said == MISSING else self.weight(role)
        times = number_in(said, TIMES_OWN)
        return found if found is None or times is None else times * found

    def stored(self, role: str) -> Tensor:
        """The same as it is stored: large tables are promoted by those who use them. Raises MissingTensor."""
        found = self.decoder.weights(self.layer, role)
        if found is None:
            where = "outside the blocks" if self.layer is None else f"in layer {self.layer}"
            raise MissingTensor(f"the checkpoint has no `{role}` {where}")
        return found.to(self.batch.tokens.device)
