"""The draft's entries for MLPs of another shape than the parent's: gate and up projection in one tensor, or no gate at all."""

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
    """The draft's entries for an MLP; `settled` holds the roles, sites, modules and tensors that need no further entry or TODO."""

    roles: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, Any] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()


def mlp_shape(near: Likeness, held: Set[str]) -> Shape:
    """Return the shape of the MLP of a model with the modules `held`.

    It is empty if the MLP has its parent's shape, or if the parent's MLP is not gated with the names of Llama's tensors.
    """
    if near.missing.get("mlp.gate") != f"{GATE}.weight":
        return Shape()
    if FUSED in held:
        return _fused()
    return _without_gate() if UP in held else Shape()


def _fused() -> Shape:
    """Return the entries for gate and up in one tensor. vLLM fuses both anyway, so only the names of its tensors change."""
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
