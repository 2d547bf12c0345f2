"""The residual of a component's formula against a capture, under given knob values.

    residual = rms(formula(captured inputs) - captured) / rms(captured)        over real tokens

In float64, with a float64 capture, the right values leave rounding (about 1e-15) and every other value leaves more. In
probes of which only the residual stream is captured, attention is computed from the stream for a few queries: the last
ones of the text, which see the whole window and the longest distances, and some before them, where chunks begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity_audit.compare.golden import GOLDEN
from parity_audit.core.limits import TINY
from parity_audit.core.sites import ATTENTION_SITES, layer_of, local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.fit.search import norm_of
from parity_audit.diagnose.thresholds import LEFT_OUT
from parity_audit.formulas.decoder import Run
from parity_audit.formulas.knob import COUNT
from parity_audit.formulas.knobs import KNOBS
from parity_audit.formulas.place import Batch, Decoder, MissingTensor, MissingTokens
from parity_audit.formulas.positions import counted
from parity_audit.formulas.site_cache import SiteCache

IMPOSSIBLE = (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError)
"""The errors that a formula raises for values that this decoder cannot have, or where a value that it reads is
missing."""
QUERIES = 8
"""Of a long text, attention is computed for this many last queries and for up to one fewer before them. They suffice
to distinguish values, and cost 300 times less than all 4160."""
TOKENS_COMPARED = 48
"""Tokens of a long text that are compared at sites where each token depends on its position alone: ever further
apart, and the last ones. Neighbouring tokens determine the frequencies of fast pairs and show positions that were
rounded; the last tokens determine those of slow pairs."""
OF_EACH_TOKEN = ("rot_q", "rot_k", "pos_embed")
"""Sites at which each token depends only on itself and its position."""
OF_ALL_BEFORE = "delta.out"
"""The site at which each token is computed from a state that all tokens before it have changed: every token of it is
compared."""
OF_TOKENS = (
    "attention.window",
    "attention.window_first",
    "attention.chunk",
    "attention.mask",
    "cache.keys",
    "delta.chunk",
)
"""Knobs that count tokens: their values are at most the length of a text."""
SITES_KEPT = 16
"""The number of sites of probes whose captured values at the compared tokens are kept in memory: those of one
search."""
Captured = Callable[[str, str], Tensor | None]
Values = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Component:
    """One site of one probe, and the knobs that its formula asks for.

    If `seen_in` names another probe, the formula gets only those captured sites of this probe that the other one
    captures too.
    """

    probe: Probe
    site: str
    knobs: frozenset[str] = frozenset()
    seen_in: str | None = None

    @property
    def layer(self) -> int | None:
        """The number of its block, None outside the blocks."""
        return layer_of(self.site)


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """The capture of one site of one probe at the tokens that are compared.

    `shape` is the shape of the site; `real` marks the real tokens, `[batch pos]`; `all_real` is whether all tokens are
    real; `values` are the captured values, `[token ...]`; `size` is their norm. `by_query`: the site is an attention
    matrix. `masked`: some of its entries are -inf, or may be.
    """

    shape: torch.Size
    real: Tensor
    all_real: bool
    values: Tensor
    size: Tensor
    by_query: bool
    masked: bool

    def of(self, x: Tensor) -> Tensor:
        """Select the compared tokens of a tensor with the site's shape, or of one that has token axes only."""
        x = x.transpose(1, 2) if self.by_query and x.ndim > self.real.ndim else x
        return x.flatten(0, 1) if self.all_real else x[self.real]


def _shown_of(site: str, seen: Tensor, real: Tensor) -> _Shown:
    by_query = site.endswith(ATTENTION_SITES)
    values = (seen.transpose(1, 2) if by_query else seen)[real]
    finite = values.isfinite()
    return _Shown(
        shape=seen.shape, real=real, all_real=bool(real.all()), values=values,
        size=values[finite].norm().clamp_min(TINY), by_query=by_query,
        masked=site.endswith("attn_scores") or not bool(finite.all()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """A capture of one side and the formulas that it is compared with.

    `captured(probe, site)` returns a captured tensor in float64, None where the capture has none. `decoder` has the
    knob values of the spec. `made_before` and `shown` keep tensors that a search uses again.
    """

    decoder: Decoder
    captured: Captured
    batches: dict[str, Batch] = field(default_factory=dict)
    made_before: SiteCache = field(default_factory=SiteCache)
    shown: dict[tuple[str, str], _Shown] = field(default_factory=dict)

    def difference(self, component: Component, values: Values) -> Tensor | None:
        """Return formula minus capture at real tokens, flat, divided by the norm of the capture.

        None where the formula cannot be computed or the shapes differ. In a decoded probe only the decoded tokens are
        compared, because the prompt before them ran as a whole.

        Tokens for which the formula is not defined are left out; if they are more than the share `LEFT_OUT` of all
        tokens, the result is None. A key that only one of formula and capture masks counts as a difference of the size
        of a typical score.
        """
        made, run = self._made(component, values)
        shown = self._shown(component)
        if made is None:
            return None
        made = self._compared(component, made)
        if made.shape != shown.shape:
            return None
        made, seen = shown.of(made), shown.values
        if run.took.undefined:
            undefined = (self._compared(component, one) for one in run.took.undefined.values())
            defined = ~shown.of(sum(undefined, torch.zeros_like(shown.real)))
            if int(defined.sum()) < (1 - LEFT_OUT) * len(defined):
                return None
            made, seen = made[defined], seen[defined]
        if not shown.masked:
            return ((made - seen) / shown.size).flatten()
        has_alibi = value_under(self, values, "attention.alibi", component.layer) is not None
        if component.site.endswith("attn_scores") and has_alibi:
            made, seen = _without_row_means(made), _without_row_means(seen)
        hidden, unseen = made.isneginf(), seen.isneginf()
        compared = ~(hidden & unseen) & (unseen | seen.isfinite())
        typical = shown.size / max(int(seen.isfinite().sum()), 1) ** 0.5
        return torch.where(hidden != unseen, typical, made - seen)[compared] / shown.size

    def _shown(self, component: Component) -> _Shown:
        """Return the capture of a component at the compared tokens. It is kept while values are searched."""
        key = component.probe.name, component.site
        if key not in self.shown:
            seen = self.captured(*key)
            assert seen is not None
            real = self._batch(component.probe).mask.bool()
            real[:, : component.probe.decode_from or 0] = False
            seen, real = self._compared(component, seen), self._compared(component, real)
            while len(self.shown) >= SITES_KEPT:
                del self.shown[next(iter(self.shown))]
            self.shown[key] = _shown_of(component.site, seen, real)
        return self.shown[key]

    def shape(self, component: Component) -> torch.Size:
        """Return the shape of a component's capture."""
        return self._shown(component).shape

    def places(self, component: Component) -> Tensor:
        """Return the positions of the compared tokens, `[token]`."""
        positions = self._batch(component.probe).positions
        return self._shown(component).of(self._compared(component, positions))

    def _compared(self, component: Component, x: Tensor) -> Tensor:
        """Select the compared tokens from a tensor `[batch pos ...]`, which may have all tokens or the compared ones
        only."""
        rows = self._rows(component)
        return x if rows is None or x.shape[1] == len(rows) else x[:, rows]

    def _rows(self, component: Component) -> Tensor | None:
        """Return the indices of the compared tokens of a long text; None if all tokens are compared."""
        length = component.probe.shape[1]
        if component.probe.sites == "all" or local_name(component.site) == OF_ALL_BEFORE:
            return None
        last = range(max(length - QUERIES, 0), length)
        if local_name(component.site) not in OF_EACH_TOKEN:
            # The fractional parts of multiples of the golden ratio are evenly spread and share no period with chunks (Weyl 1916).
            earlier = (int(length * (part * GOLDEN % 1)) for part in range(1, QUERIES))
            return torch.tensor(sorted({*earlier, *last}))
        apart = torch.logspace(0, math.log10(length), min(TOKENS_COMPARED, length), dtype=torch.float64)
        return torch.tensor(sorted({*(round(place) - 1 for place in apart.tolist()), *last}))

    def read_by(self, component: Component) -> frozenset[str]:
        """Return the sites that a component's formula reads under the spec's values."""
        return frozenset(self._made(component, self.decoder.values)[1].read.get(component.site, ()))

    def hidden_before(self, component: Component) -> frozenset[str]:
        """Return the sites that a component's formula reads and that are not captured."""
        name = component.probe.name
        return frozenset(site for site in self.read_by(component) if self.captured(name, site) is None)

    def made(self, component: Component, values: Values | None = None) -> Tensor | None:
        """Return the output of the formula, under the spec's values by default; None where it cannot be computed."""
        return self._made(component, self.decoder.values if values is None else values)[0]

    def lacks(self, component: Component, values: Values) -> bool:
        """Return whether a component's formula needs, under these values, a tensor that the checkpoint does not
        hold, or tokens that are not computed."""
        try:
            with torch.no_grad():
                self._run(component, values).computed(component.site)
        except (MissingTensor, MissingTokens):
            return True
        except IMPOSSIBLE:
            return False
        return False

    def residual(self, component: Component, values: Values) -> float:
        """Return the norm of `difference`; infinite where there is none."""
        return norm_of(self.difference(component, values))

    def asked(self, component: Component, values: Values) -> frozenset[str]:
        """Return the knobs that this component's formula asks for under these values."""
        return frozenset(self._made(component, values)[1].took.asked)

    def _made(self, component: Component, values: Values) -> tuple[Tensor | None, Run]:
        run = self._run(component, values)
        try:
            with torch.no_grad():
                return run.computed(component.site), run
        except IMPOSSIBLE:
            return None, run

    def _run(self, component: Component, values: Values) -> Run:
        """Return the run of a component's probe through the decoder, in which captured sites take the place of
        computed ones."""
        probe, rows, batch = component.probe, self._rows(component), self._batch(component.probe)
        decoder, alike = replace(self.decoder, values=values), f"{probe.name} as {component.seen_in}"
        if rows is not None and local_name(component.site) in OF_EACH_TOKEN:
            return Run(
                decoder=decoder, batch=_tokens_of(batch, rows), kept=self.made_before, alike=f"{alike}, some tokens",
                given=lambda site: self._at(component, site, rows),
            )  # fmt: skip
        return Run(
            decoder=decoder, batch=batch, queries=rows, kept=self.made_before, given=lambda site: self._given(component, site),
            alike=alike if rows is None else f"{alike}, some queries",
        )  # fmt: skip

    def _at(self, component: Component, site: str, rows: Tensor) -> Tensor | None:
        found = self._given(component, site)
        return None if found is None else found[:, rows]

    def _given(self, component: Component, site: str) -> Tensor | None:
        if component.seen_in is not None and self.captured(component.seen_in, site) is None:
            return None
        return self.captured(component.probe.name, site)

    def _batch(self, probe: Probe) -> Batch:
        if probe.name not in self.batches:
            mask = torch.tensor(probe.mask)
            positions = counted(mask)
            if len(probe.kept) == probe.shape[1] and bool(mask.all()):
                positions = torch.tensor(probe.kept).expand_as(positions)
            self.batches[probe.name] = Batch(
                tokens=torch.tensor(probe.token_ids), mask=mask, positions=positions, decoded_from=probe.decode_from,
                at_once=probe.at_once,
            )  # fmt: skip
        return self.batches[probe.name]


def _without_row_means(scores: Tensor) -> Tensor:
    """Return scores `[... key]` minus their mean over the keys that are not masked.

    A constant per query does not change the pattern, and programs write a penalty for distance with and without one.
    """
    shown = scores.isfinite()
    mean = scores.where(shown, 0.0).sum(-1, keepdim=True) / shown.sum(-1, keepdim=True).clamp_min(1)
    return scores - mean


def _tokens_of(batch: Batch, rows: Tensor) -> Batch:
    """Return a batch of the tokens in `rows` alone, for sites at which each token depends only on itself."""
    return Batch(
        tokens=batch.tokens[:, rows], mask=batch.mask[:, rows], positions=batch.positions[:, rows], shown=rows
    )  # fmt: skip


def changed(values: Values, knob: str, value: Any, layers: Sequence[int], count: int, before: Any = None) -> Values:
    """Return the values with one knob changed in some layers. `before` is the knob's value if it is not among the
    values."""
    own = list(values.get(knob, [before] * count))
    return {**values, knob: [value if layer in layers else old for layer, old in enumerate(own)]}


def with_value(residuals: Residuals, values: Values, knob: str, value: Any, layer: int | None) -> Values:
    """Return the values with one knob changed in a layer; outside the blocks (`layer` None) it is changed in all
    layers."""
    count, before = residuals.decoder.dims["n_layers"], residuals.decoder.knob(knob, layer)
    return changed(values, knob, value, range(count) if layer is None else [layer], count, before)


def value_under(residuals: Residuals, values: Values, knob: str, layer: int | None) -> Any:
    """Return the value of a knob in a layer for a decoder with these values."""
    return replace(residuals.decoder, values=values).knob(knob, layer)


def largest(residuals: Residuals, component: Component, knob: str) -> int:
    """Return the largest whole number that a knob can be in this model."""
    dims = residuals.decoder.dims
    own = {
        "n_kv_heads": dims["n_heads"], **dict.fromkeys(("rope.partial", "rope.first_dim"), dims["d_head"]),
        "attention.shared_layers": dims["n_layers"] - 1, "attention.shared_source": dims["n_layers"] - 1,
        "altup.active": dims.get("n_streams", 1) - 1,
        **dict.fromkeys(("residual.blocks_dropped", "per_layer.blocks_on"), dims["n_layers"] - 1),
        **dict.fromkeys(("moe.top_k", "moe.groups", "moe.top_groups"), dims.get("n_experts", 1)),
        **dict.fromkeys(OF_TOKENS, component.probe.shape[1]),
    }  # fmt: skip
    row = KNOBS[knob]
    return own.get(knob, int(row.span[1]) if row.kind == COUNT and row.span else 0)
