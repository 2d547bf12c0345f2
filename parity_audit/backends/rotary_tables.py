"""Rotary tables in a wider dtype than the activations that they rotate.

Attention code multiplies queries and keys by cosine and sine and adds the two products. With a wider table both
products and their sum have the wider dtype. The sum is then cast back to the dtype of the activations, because all
later code expects that dtype. No attention code is replaced: the table is a tensor subclass that intercepts
these multiplications and additions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PRODUCTS = {"mul", "multiply", "__mul__", "__rmul__"}
SUMS = {"add", "sub", "__add__", "__radd__", "__sub__", "__rsub__"}


class FineTable(Tensor):
    """A rotary table, or the product of one with activations.

    `sum_dtype` is the dtype of the activations, to which the sum of two products is cast; None for the table itself.
    """

    sum_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, table: Tensor, narrow: torch.dtype | None = None) -> FineTable:
        """Return `table` as a `FineTable` with the same values, with `narrow` as its `sum_dtype`."""
        made = table.as_subclass(cls)
        made.sum_dtype = narrow
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor):
            return out
        out = out.as_subclass(Tensor)
        fine = [arg for arg in args if isinstance(arg, FineTable)]
        narrow = next((table.sum_dtype for table in fine if table.sum_dtype is not None), None)
        if name in SUMS and narrow is not None:
            return out.to(narrow)
        if name in PRODUCTS:
            plain = [arg.dtype for arg in args if isinstance(arg, Tensor) and not isinstance(arg, FineTable)]
            narrow = plain[0] if plain else narrow
        return cls.of(out, narrow)
