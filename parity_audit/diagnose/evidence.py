"""The input and output of the identifiers: activations of one side in, fitted constants out.

An identifier never reads a config. It sees the tensors that one side computed, makes the same fit on both sides, and
leaves the comparison to `findings.merge`. Tensors may have any floating dtype; identifiers convert what they use to
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue, NotTested, Probe
from parity_audit.formulas.knobs import name_in_spec
from parity_audit.formulas.stored import CheckpointTensors, centred_as, role_tensor
from parity_audit.specs.view import config_names, dims, dims_of_layer, knob_values, roles

if TYPE_CHECKING:
    from parity_audit.capture.session import SidePlan
    from parity_audit.capture.store import Capture


class KnobSpec(Protocol):
    """The spec's values of one knob; `parity_audit.specs.ResolvedKnob` implements this protocol."""

    @property
    def by_layer(self) -> bool:
        """Whether each layer has a value of its own."""

    def at(self, layer: int | None) -> KnobValue:
        """The knob's value in a layer."""


TensorOf = Callable[[str, str], Union[Tensor, None]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One side's activations in one layer, or outside the blocks if `layer` is None.

    `tensor(probe, site)` takes a site relative to the block ("q", "ln1.out") when `layer` is a number, else a full site
    name ("embed", "blocks.3.resid_post", "logits"); it returns None if the site is not visible. `weight(role)` returns
    a checkpoint tensor, for example: "embed" and "unembed" `[d_vocab d_model]`, "norm.ln1", "norm.ln2",
    "norm.ln1_post", "norm.ln2_post", "norm.final" `[d_model]`, "mlp.gate" and "mlp.up" `[d_mlp d_model]`. `dims` has
    d_model, n_heads, n_kv_heads, d_head and n_layers. `dtype` is the dtype in which the run computes; if None, it is
    the dtype in which the activations are stored.
    """

    side: str
    layer: int | None
    dims: Mapping[str, int]
    knobs: Mapping[str, KnobSpec]
    probes: tuple[Probe, ...]
    tensor: TensorOf
    weight: Callable[[str], Union[Tensor, None]]
    dtype: str | None = None

    def spec_value(self, knob: str) -> KnobValue:
        """The spec's value of a knob in this layer; None if the spec has no such knob."""
        return spec_value(self.knobs, knob, self.layer)

    def spec_number(self, knob: str, default: float) -> float:
        """The spec's number for a knob in this layer, or `default` if the spec has no number for it."""
        value = self.spec_value(knob)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def short_probes(self) -> Iterator[Probe]:
        """The probes that capture every site."""
        return (probe for probe in self.probes if probe.sites == "all")


EXPLAINED_BY, FORMULA = "explained_by", "formula"
"""Entry in the evidence of a fit: with this value, a formula of the component leaves only rounding."""
POINTS = "points"
"""Entry in the evidence of a fit: a sample of the points that were fitted, for a plot. A finding keeps those of its
first layer."""
PICTURE_POINTS = 120
"""Number of attention scores in a plot: enough to see a curve bend."""


def drawn_points(products: Tensor, scores: Tensor, law: Tensor) -> list[list[float]]:
    """Sample points (q.k, captured score, fitted score) for a plot, evenly over the order of q.k, with five digits.

    Args:
        products: the products q.k, `[entry]`.
        scores: the captured scores, `[entry]`.
        law: the fitted scores, `[entry]`.
    """
    columns = torch.stack([products, scores, law], -1)
    rows = columns[products.argsort()][spread(len(columns), PICTURE_POINTS)]
    return [[float(f"{value:.5g}") for value in row] for row in rows.tolist()]


@dataclass(frozen=True, kw_only=True)
class KnobFit:
    """One constant, fitted on the activations of one side.

    `residual` is the relative RMS that the fit leaves unexplained. The comparison of both sides uses `value` and, for
    numbers, `stderr`.
    """

    knob: str
    layer: int | None
    value: KnobValue
    stderr: float | None
    residual: float
    n: int
    site: str
    evidence: dict[str, Any] = field(default_factory=dict)


Outcome = Union[KnobFit, NotTested]


def spec_has_knob(knobs: Mapping[str, KnobSpec], knob: str) -> bool:
    """Whether the spec has a value for this knob. A knob of the norms of q and k may take its value from the same knob
    of norms."""
    return name_in_spec(knob, knobs) is not None


def spec_value(knobs: Mapping[str, KnobSpec], knob: str, layer: int | None) -> KnobValue:
    """The spec's value of a knob in a layer; None if the spec has no such knob."""
    name = name_in_spec(knob, knobs)
    return None if name is None else knobs[name].at(layer)


def where(evidence: Evidence) -> str:
    """The name of this evidence's layer, for messages."""
    return "outside the blocks" if evidence.layer is None else f"layer {evidence.layer}"


def gap(evidence: Evidence, knob: str, why: str) -> NotTested:
    """A `NotTested` for a knob that could not be fitted on this side, with the reason."""
    return NotTested(what=f"{knob} of the {evidence.side}, {where(evidence)}", why=why)


def real(probe: Probe) -> Tensor:
    """A mask `[batch pos]` that is True at real tokens and False at padding."""
    return torch.tensor(probe.mask, dtype=torch.bool)


def tokens_of(evidence: Evidence, *names: str) -> list[Tensor] | None:
    """The real tokens of these sites, `[token ...]` in float64, over all probes that capture every site.

    Probes in which one of the sites is not visible are skipped; None if no probe is left.
    """
    rows: list[list[Tensor]] = []
    for probe in evidence.short_probes():
        tensors = [evidence.tensor(probe.name, name) for name in names]
        if all(tensor is not None for tensor in tensors):
            rows.append([f64(tensor[real(probe)]) for tensor in tensors if tensor is not None])
    return [torch.cat(column) for column in zip(*rows, strict=True)] if rows else None


def spread(count: int, wanted: int) -> Tensor:
    """At most `wanted` indices, spread evenly over `range(count)` and including both ends; the result is deterministic."""
    if count <= wanted:
        return torch.arange(count)
    # The step between indices is longer than 1, so no index repeats.
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def f64(tensor: Tensor) -> Tensor:
    """The tensor, detached, in float64 on the CPU."""
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def relative_rms(residual: Tensor, of: Tensor) -> float:
    """Relative rms: rms(residual) / rms(of). The norm of `residual` if `of` is 0 everywhere, so 0 if both are."""
    norm = float(of.norm())
    return float(residual.norm()) / norm if norm > 0.0 else float(residual.norm())


def evidence_by_layer(
    side: str, captures: Sequence[Capture], plan: SidePlan, dtype: str | None = None
) -> dict[int | None, Evidence]:
    """Evidence from captures of one side: one entry per block, and the entry None for sites outside the blocks.

    A tensor of a (probe, site) is read from the first capture that has it, among those that kept the most positions of
    that probe. Activations and checkpoint weights are read from disk when they are asked for.

    Args:
        side: the name of the side, for messages.
        captures: captures of this side.
        plan: the reference's plan: its spec, config and checkpoint.
        dtype: the dtype in which the run computes, if its captures may be stored in a wider one.
    """
    sizes, knobs = dims(plan.spec, plan.config), knob_values(plan.spec, plan.config)
    said = config_names(plan.config, **sizes)
    probes, owners = _most_positions(captures)
    stored = CheckpointTensors(Path(plan.checkpoint.path))
    tied = bool(plan.config.get("tie_word_embeddings", True))

    def of(layer: int | None) -> Evidence:
        prefix = "" if layer is None else f"blocks.{layer}."
        names = roles(plan.spec, plan.config, layer)

        def tensor(probe: str, site: str) -> Tensor | None:
            owner = next((capture for capture in owners.get(probe, ()) if prefix + site in capture.sites(probe)), None)
            return None if owner is None else owner.tensor(probe, prefix + site)

        def weight(role: str) -> Tensor | None:
            return centred_as(role, role_tensor(stored, names, role, tied=tied), plan.centred)

        return Evidence(
            side=side, layer=layer, dims=dims_of_layer(plan.spec, said, sizes, layer), knobs=knobs,
            probes=tuple(probes.values()), tensor=tensor, weight=weight, dtype=dtype,
        )  # fmt: skip

    return {layer: of(layer) for layer in (None, *range(sizes["n_layers"]))}


def _most_positions(captures: Sequence[Capture]) -> tuple[dict[str, Probe], dict[str, list[Capture]]]:
    """Each probe in the version with the most positions that any capture kept, and the captures that kept that many."""
    probes: dict[str, Probe] = {}
    owners: dict[str, list[Capture]] = {}
    for capture in captures:
        for probe in capture.probes:
            known = probes.get(probe.name)
            if known is None or probe.shape[1] > known.shape[1]:
                probes[probe.name], owners[probe.name] = probe, [capture]
            elif probe.shape == known.shape:
                owners[probe.name].append(capture)
    return probes, owners
