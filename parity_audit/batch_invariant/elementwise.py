"""Functions of single numbers (`silu`, `gelu`, `tanh`, `exp`, ...) on the CPU.

torch computes them eight or sixteen numbers at a time and the rest of each thread's share one by one, by another
implementation with other last bits: the same number at another place of the tensor, or beside more rows, comes out
differently. Here every share is a whole number of vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

VECTOR = 64
"""Numbers: a multiple of every vector length, unrolled or not."""
GRAIN = 32768
"""Numbers that torch gives a thread at least (`at::internal::GRAIN_SIZE`)."""
GRAIN_OF_GELU = 16384
"""Numbers from which on GELU goes to all threads."""
FUNCTIONS = (
    "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "mish", "rsqrt", "sigmoid", "silu", "sin", "softplus",
    "tanh",
)  # fmt: skip


def pointwise(native: Any, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`native` (an `out=` overload) of every number, as if it stood in a full vector."""
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
    return padded.resize_(values.shape)  # forgets what was filled up


def whole_vectors(count: int, threads: int) -> int:
    """The least number from `count` on that the threads share in whole vectors."""
    size = count
    while size % (VECTOR * _shares(size, threads)):
        multiple = VECTOR * _shares(size, threads)
        size = -(-size // multiple) * multiple
    return size


def _shares(count: int, threads: int) -> int:
    """A multiple of the numbers of threads that share a tensor of this size."""
    ordinary = max(1, min(threads, -(-count // GRAIN)))
    return math.lcm(ordinary, threads) if count > GRAIN_OF_GELU else ordinary
