"""What an identifier is given, and what it answers: activations of one side in, fitted constants out.

An identifier never reads a config. It sees the tensors that one side computed, makes the same fit on
both sides, and leaves the comparison to `findings.merge`. Tensors may come in any floating dtype;
identifiers promote what they use to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue, NotTested, Probe
from parity_audit.formulas.knobs import said_by
from parity_audit.formulas.stored import CheckpointTensors, centred_as, role_tensor
from parity_audit.specs.view import config_names, dims, dims_of_layer, knob_values, roles

if TYPE_CHECKING:
    from parity_audit.capture.session import SidePlan
    from parity_audit.capture.store import Capture


class KnobSpec(Protocol):
    """What the spec says of one knob; `parity_audit.specs.ResolvedKnob` is one."""

    @property
    def by_layer(self) -> bool:
        """Whether each layer has a value of its own."""

    def at(self, layer: int | None) -> KnobValue:
        """The value in a layer."""


TensorOf = Callable[[str, str], Union[Tensor, None]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One side's activations in one layer (or outside the blocks: `layer` None).

    `tensor(probe, site)` takes a site relative to the block ("q", "ln1.out") when `layer` is a number,
    else a full one ("embed", "blocks.3.resid_post", "logits"); None means not visible.
    `weight(role)` is a checkpoint tensor: "embed" and "unembed" `[d_vocab d_model]`, "norm.ln1", "norm.ln2",
    "norm.ln1_post", "norm.ln2_post", "norm.final" `[d_model]`, "mlp.gate" and "mlp.up" `[d_mlp d_model]`.
    `dims` has d_model, n_heads, n_kv_heads, d_head, n_layers. `dtype` is what the run computes in; None: what it is stored in.
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
        """What the spec says of a knob in this layer; None where it is silent."""
        return spec_value(self.knobs, knob, self.layer)

    def spec_number(self, knob: str, default: float) -> float:
        """The spec's number, or a start value where it has none."""
        value = self.spec_value(knob)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def short_probes(self) -> Iterator[Probe]:
        """The probes that capture every site."""
        return (probe for probe in self.probes if probe.sites == "all")


EXPLAINED_BY, FORMULA = "explained_by", "formula"
"""In the evidence of a fit: that a formula of the component with this value leaves rounding."""
POINTS = "points"
"""In the evidence of a fit: some of what it was fitted to, for a picture. A finding keeps those of its first layer."""
PICTURE_POINTS = 120
"""Scores of a picture: enough to see a curve bend."""


def drawn_points(products: Tensor, scores: Tensor, law: Tensor) -> list[list[float]]:
    """(q.k, captured score, fitted score) of `[entry]` each, evenly over the order of q.k, with the digits that a picture shows."""
    columns = torch.stack([products, scores, law], -1)
    rows = columns[products.argsort()][spread(len(columns), PICTURE_POINTS)]
    return [[float(f"{value:.5g}") for value in row] for row in rows.tolist()]


@dataclass(frozen=True, kw_only=True)
class KnobFit:
    """One constant as one side's activations show it.

    `residual` is the relative rms that the fit leaves unexplained. Comparison uses `value` and, of numbers, `stderr`.
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


def spoken_of(knobs: Mapping[str, KnobSpec], knob: str) -> bool:
    """Whether the spec has the knob; what it says of norms holds for those of q and k where it says no more."""
    return said_by(knob, knobs) is not None


def spec_value(knobs: Mapping[str, KnobSpec], knob: str, layer: int | None) -> KnobValue:
    """The spec's value of a knob in a layer, None where the spec has no such knob."""
    name = said_by(knob, knobs)
    return None if name is None else knobs[name].at(layer)


def where(evidence: Evidence) -> str:
    """The place, for messages."""
    return "outside the blocks" if evidence.layer is None else f"layer {evidence.layer}"


def gap(evidence: Evidence, knob: str, why: str) -> NotTested:
    """A knob that could not be read off this side, and why."""
    return NotTested(what=f"{knob} of the {evidence.side}, {where(evidence)}", why=why)


def real(probe: Probe) -> Tensor:
    """`[batch pos]` True at real tokens."""
    return torch.tensor(probe.mask, dtype=torch.bool)


def tokens_of(evidence: Evidence, *names: str) -> list[Tensor] | None:
    """Real tokens `[token ...]`, in float64, of sites that are all visible, over all short probes."""
    rows: list[list[Tensor]] = []
    for probe in evidence.short_probes():
        tensors = [evidence.tensor(probe.name, name) for name in names]
        if all(tensor is not None for tensor in tensors):
            rows.append([f64(tensor[real(probe)]) for tensor in tensors if tensor is not None])
    return [torch.cat(column) for column in zip(*rows, strict=True)] if rows else None


def spread(count: int, wanted: int) -> Tensor:
    """At most `wanted` indices spread evenly over `range(count)`, both ends included; the same every time."""
    if count <= wanted:
        return torch.arange(count)
    # Steps are longer than 1, so none repeats.
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def f64(tensor: Tensor) -> Tensor:
    """The tensor in float64 on the CPU."""
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def relative_rms(residual: Tensor, of: Tensor) -> float:
    """rms(residual) / rms(of), 0 when both vanish."""
    norm = float(of.norm())
    return float(residual.norm()) / norm if norm > 0.0 else float(residual.norm())


def evidence_by_layer(
    side: str, captures: Sequence[Capture], plan: SidePlan, dtype: str | None = None
) -> dict[int | None, Evidence]:
    """Evidence from captures of one side: one per block, and None for what lies outside the blocks.

    A (probe, site) is read from the first capture that holds it, of those that kept the most positions of that probe;
    tensors and checkpoint weights are read when asked for. `plan` is the reference's: its spec, config and checkpoint. `dtype`: what
    the run computes in, where its captures may be stored in a wider one.
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
    """Every probe with the most positions that a capture kept of it, and the captures that kept those."""
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
