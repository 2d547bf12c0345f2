"""Elementwise functions (`silu`, `gelu`, `tanh`, `exp`, ...) on the CPU.

torch computes them on vectors of eight or sixteen numbers. What remains of each thread's share is computed number by
number, with another implementation whose last bits differ. The same number at another place of the tensor, or in a
tensor with more rows, then gives another result. Here each thread's share is a whole number of vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

VECTOR = 64
"""A multiple of the numbers in a vector on every processor, with or without loop unrolling."""
GRAIN = 32768
"""Fewest numbers that torch gives to a thread (`at::internal::GRAIN_SIZE`)."""
GRAIN_OF_GELU = 16384
"""Size of a tensor above which torch computes GELU with all threads."""
FUNCTIONS = (
    "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "mish", "rsqrt", "sigmoid", "silu", "sin", "softplus",
    "tanh",
)  # fmt: skip


def pointwise(native: Any, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply `native` (an `out=` overload) to a padded tensor, so that every number is computed in a full vector."""
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    values = values.contiguous()
    count = values.numel()
    size = -(-count // VECTOR) * VECTOR if count <= GRAIN_OF_GELU else whole_vectors(count, torch.get_num_threads())
    if size == count:
        out = torch.empty_like(values)
        native(values, *args, **kwargs, out=out)
        return out
    padded = torch.constant_pad_nd(values.view(-1), (0, size - count))
    native(padded, *args, **kwargs, out=padded)
    return padded.resize_(values.shape)  # drops the padding


def whole_vectors(count: int, threads: int) -> int:
    """Return the smallest size, at least `count`, that threads divide into shares of whole vectors."""
    size = count
    while size % (VECTOR * _shares(size, threads)):
        multiple = VECTOR * _shares(size, threads)
        size = -(-size // multiple) * multiple
    return size


def _shares(count: int, threads: int) -> int:
    """Return a common multiple of the numbers of threads among which torch may divide a tensor of this size.

    Most functions use one thread per `GRAIN` numbers, up to `threads`. Above `GRAIN_OF_GELU` numbers, GELU uses all
    `threads`, so the result is then a multiple of both numbers.
    """
    ordinary = max(1, min(threads, -(-count // GRAIN)))
    return math.lcm(ordinary, threads) if count > GRAIN_OF_GELU else ordinary
