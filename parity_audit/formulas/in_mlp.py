"""The sites of an MLP: its input, its inner projections, and how they are combined.

There is one function per site. Each takes a `FormulaContext`, from which it asks for inputs, tensors and knobs.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.activations import GELU_ROOT, is_tanh_gelu, slope_of_clamped
from parity_audit.formulas.choices import AFTER_SUM, FIRST_NORM, GATE_UP, SAMPLE
from parity_audit.formulas.in_norms import read_by_sublayers
from parity_audit.formulas.mlp import gated, sparse
from parity_audit.formulas.place import FormulaContext
from parity_audit.formulas.projections import project


def is_parallel(at: FormulaContext) -> bool:
    """Whether attention and MLP read the same stream."""
    said: object = at.knob("residual.parallel")
    return said is True


def mlp_input(at: FormulaContext) -> Tensor:
    """Return the input of the MLP, `[batch pos d_model]`: the stream, or the output of a norm."""
    if read_by_sublayers(at):
        if at.knob("norm.order") == AFTER_SUM:
            return at.site("ln1.out")
        return at.entering() if is_parallel(at) else at.site("resid_mid")
    reads_first = at.knob("mlp.input") == FIRST_NORM if at.has("norm.ln2") else is_parallel(at)
    return at.site("ln1.out" if reads_first else "ln2.out")


def inner(at: FormulaContext, role: str) -> Tensor:
    """Return the projection of the MLP's input by the tensor of this role, `[batch pos d_mlp]`."""
    return project(mlp_input(at), at.tensor(role), at.weight(f"{role}.bias"))


def has_gate(at: FormulaContext) -> bool:
    """Whether the MLP combines two inner projections; without a gate, one projection goes through the activation."""
    return at.has("mlp.gate")


def hidden(at: FormulaContext, pre: Tensor, linear: Tensor | None) -> Tensor:
    """Return the activation of `pre`, times `linear` if that is given."""
    name = at.knob("mlp.activation")
    if slope_of_clamped(name) is not None:
        return gated(pre, linear, name=name, limit=at.knob("mlp.limit"), clamped=at.knob("mlp.clamped"))
    root = at.knob("mlp.gelu_root") if is_tanh_gelu(name) else GELU_ROOT
    return gated(pre, linear, name=name, gelu_root=root, arithmetic=at.knob("mlp.dtype"))


def combined(at: FormulaContext, pre: Tensor, linear: Tensor) -> Tensor:
    """Return `hidden` of gate and up, or of up and gate if `mlp.gate_up` says that up is activated."""
    return hidden(at, linear, pre) if at.knob("mlp.gate_up") == GATE_UP[1] else hidden(at, pre, linear)


def cut_as_said(at: FormulaContext, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of gate and up, each `[d_mlp d_model]`, cut wrongly from their fused tensor if `mlp.gate_up` says so."""
    cut = at.knob("mlp.gate_up")
    if cut == GATE_UP[2]:
        both = torch.cat([gate, up])
        return both[0::2], both[1::2]
    if cut == GATE_UP[3]:
        both = rearrange([gate, up], "two row column -> (row two) column")
        return both[: len(gate)], both[len(gate) :]
    return gate, up


def gated_inner(at: FormulaContext, which: int) -> Tensor:
    """Return the first (0, the gate) or the second (1, up) of the two inner projections, `[batch pos d_mlp]`."""
    role = ("mlp.gate", "mlp.up")[which]
    pair = cut_as_said(at, at.tensor("mlp.gate"), at.tensor("mlp.up"))
    return project(mlp_input(at), pair[which], at.weight(f"{role}.bias"))


def post(at: FormulaContext) -> Tensor:
    """Return the input of the output projection, `[batch pos d_mlp]`."""
    if not has_gate(at):
        return hidden(at, at.site("mlp.pre"), None)
    pre, linear = at.site("mlp.pre"), at.site("mlp.pre_linear")
    if at.knob("mlp.sparsity") is not None:
        pre = sparse(pre, at.knob("mlp.sparsity"), correction=int(at.knob("mlp.sparsity_spread") == SAMPLE))
    return combined(at, pre, linear)


def down(at: FormulaContext) -> Tensor:
    """Return the output of the output projection, `[batch pos d_model]`."""
    return project(at.site("mlp.post"), at.tensor("mlp.down"), at.weight("mlp.down.bias"))
