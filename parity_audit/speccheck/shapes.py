"""MLPs of other shapes than the parent's, written out: a gate and an up projection in one tensor, and no gate at all."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from parity_audit.speccheck.nearest import Likeness

MLP = "model.layers.{l}.mlp"
GATE, UP, FUSED = f"{MLP}.gate_proj", f"{MLP}.up_proj", f"{MLP}.gate_up_proj"
PRE, LINEAR = "blocks.{l}.mlp.pre", "blocks.{l}.mlp.pre_linear"
FIRST, SECOND = ["0", "d_mlp"], ["d_mlp", "2 * d_mlp"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a draft says of an MLP, and the roles, sites and modules that this settles."""

    roles: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, Any] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()


def mlp_shape(near: Likeness, held: Set[str]) -> Shape:
    """The MLP of a model with these modules, where the parent's is the gated one of Llama's names."""
    if near.missing.get("mlp.gate") != f"{GATE}.weight":
        return Shape()
    if FUSED in held:
        return _fused()
    return _without_gate() if UP in held else Shape()


def _fused() -> Shape:
    """Engines that fuse both anyway show the same sites; only tensors have another name."""
    tensor = f"{FUSED}.weight"
    return Shape(
        roles={"mlp.gate": {"tensor": tensor, "slice": FIRST}, "mlp.up": {"tensor": tensor, "slice": SECOND}},
        backends={
            "hf": {"sites": {PRE: {"module": FUSED, "slice": FIRST}, LINEAR: {"module": FUSED, "slice": SECOND}}},
            "vllm": {"weights": {f"{GATE}.weight": None, f"{UP}.weight": None, tensor: {"path": _live(tensor)}}},
        },
        settled=frozenset({"mlp.gate", "mlp.up", PRE, LINEAR, FUSED, tensor}),
    )


def _without_gate() -> Shape:
    none = {LINEAR: None}
    return Shape(
        roles={"mlp.gate": None, "mlp.gate.bias": None},
        backends={
            "hf": {"sites": {PRE: {"module": UP}, **none}},
            "transformer_bridge": {"sites": {PRE: {"module": "blocks.{l}.mlp.in.hook_out"}, **none}},
            "vllm": {
                "sites": {PRE: {"module": UP, "slice": None}, **none},
                "weights": {f"{GATE}.weight": None, f"{UP}.weight": {"path": _live(f"{UP}.weight"), "slice": None}},
            },
        },
        settled=frozenset({"mlp.gate", PRE, LINEAR, UP}),
    )


def _live(tensor: str) -> str:
    return tensor.replace(".{l}.", "[{l}].")
