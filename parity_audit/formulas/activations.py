"""Activations of an MLP, by the names that configs use.

Sources: GELU (arXiv 1606.08415) and its tanh form; SwiGLU (arXiv 2002.05202); gpt-oss clamps its gate and its linear input and
adds 1 to the latter (`clamped_swiglu`, limit 7, slope 1.702).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from parity_audit.formulas.choices import CLAMPED_PARTS, CLAMPED_WITH, LEAKY, SWISH, TIMES, number_in

CLAMPED, TANH_GELU = "swiglu_clamped", "gelu_pytorch_tanh"
CLAMPED_ALONE = f"{CLAMPED} without the 1 added"
SWISH_SLOPE = 1.702
"""The slope in x sigmoid(a x) with which GPT-OSS and `quick_gelu` approximate GELU."""
GELU_ROOT, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715
"""The constants sqrt(2/pi) and 0.044715 of the tanh form of GELU, as the paper on GELU gives them."""

Curve = Callable[[Tensor], Tensor]


def tanh_gelu(x: Tensor, root: float = GELU_ROOT) -> Tensor:
    """Return the tanh form of GELU of x; `root` is its constant sqrt(2/pi), which BLOOM's code writes with eight digits only."""
    return 0.5 * x * (1.0 + torch.tanh(root * (x + GELU_CUBE * x**3)))


NAMED: dict[str, Curve] = {
    "gelu": functional.gelu,
    TANH_GELU: tanh_gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(SWISH_SLOPE * x),
    "silu": functional.silu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
    "none": torch.ones_like,
}
SAME_AS = {
    "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_tanh": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu", "squared_relu": "relu2",
}  # fmt: skip


def canonical(name: object) -> str:
    """Return the one name used here for an activation that configs call by several names (`swish` is `silu`)."""
    return SAME_AS.get(str(name), str(name))


def is_tanh_gelu(name: str) -> bool:
    """Whether an activation is the tanh form of GELU, or a multiple of it."""
    return canonical(name.rpartition(TIMES)[2]) == TANH_GELU


def activation(name: str, root: float = GELU_ROOT) -> Curve:
    """Return the activation function that a name stands for.

    A name may contain a number: `swish(1.5)` is x sigmoid(1.5 x), `leaky_relu(0.2)` has the slope 0.2 below 0, and `0.5 * silu` is
    silu times 0.5.

    Args:
        name: the activation as configs or findings write it.
        root: the constant sqrt(2/pi) of the tanh form of GELU.

    Raises:
        ValueError: no activation has this name.
    """
    factor, _, own = name.rpartition(TIMES)
    found = NAMED.get(canonical(own))
    if factor:
        return lambda x: float(factor) * activation(own, root)(x)
    slope, below = number_in(name, SWISH), number_in(name, LEAKY)
    if slope is not None:
        return lambda x: x * torch.sigmoid(slope * x)
    if below is not None:
        return partial(functional.leaky_relu, negative_slope=below)
    if found is None:
        raise ValueError(f"unknown activation `{name}`")
    return partial(tanh_gelu, root=root) if found is tanh_gelu else found


def slope_of_clamped(name: str) -> float | None:
    """Return the slope of the sigmoid in a clamped SwiGLU, or None if the activation is not a clamped SwiGLU."""
    return SWISH_SLOPE if name in (CLAMPED, CLAMPED_ALONE) else number_in(name, CLAMPED_WITH)


def clamped_swiglu(
    pre: Tensor, linear: Tensor, alpha: float, limit: float, *, clamped: str = CLAMPED_PARTS[0], added: float = 1.0
) -> Tensor:  # fmt: skip
    """Return gpt-oss's activation: (clamp(linear, -limit, limit) + added) x sigmoid(alpha x) with x = min(pre, limit).

    `clamped` is one of `choices.CLAMPED_PARTS`: some programs clamp only one of the two inputs, or clamp the gate on both sides.
    """
    of_both, of_gate, of_linear, on_both_sides = CLAMPED_PARTS
    if clamped in (of_both, of_gate):
        pre = pre.clamp(max=limit)
    if clamped == on_both_sides:
        pre = pre.clamp(-limit, limit)
    if clamped in (of_both, of_linear, on_both_sides):
        linear = linear.clamp(-limit, limit)
    return (linear + added) * pre * torch.sigmoid(alpha * pre)
