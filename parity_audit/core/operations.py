"""Messages between parent and worker for running single operations of a model again, on rows of their own input."""

from __future__ import annotations

from dataclasses import dataclass, field

from parity_audit.core.types import NotTested, Probe

ROWS, BATCH, QUERIES, KEYS = "rows", "batch", "queries", "key splits"
"""What is varied: the rows of a matrix product or norm, the sequences of attention, the queries computed at once, or
the number of parts in which the keys of attention are reduced."""


@dataclass(frozen=True, kw_only=True)
class OperationsRequest:
    """Run `probe` (one row) once, record the input of each operation, and run each operation again at every size in
    `sizes`.

    `splits` are the numbers of parts in which the keys of attention are reduced.
    """

    probe: Probe
    sizes: tuple[int, ...]
    splits: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation, and the bits of the same row of its result at each size.

    `name` is the module's path or the function, `kind` its class. `like_it` counts the other operations with the same
    class and shapes, which were not run. `hashes` is `[size]`, in the order of `sizes`. `relative` is the largest
    difference from the result at the first size, relative to the largest number of that result.
    """

    name: str
    kind: str
    shape: str
    varied: str
    sizes: tuple[int, ...]
    hashes: tuple[str, ...]
    relative: float = 0.0
    like_it: int = 0


@dataclass(frozen=True, kw_only=True)
class OperationsReply:
    """The operations, in the order in which the model first ran them."""

    operations: tuple[Operation, ...]
    not_tested: tuple[NotTested, ...] = field(default_factory=tuple)
