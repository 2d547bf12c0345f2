"""Operations of a model run again on rows of their own input, as the wire carries them."""

from __future__ import annotations

from dataclasses import dataclass, field

from parity_audit.core.types import NotTested, Probe

ROWS, BATCH, QUERIES, KEYS = "rows", "batch", "queries", "key splits"
"""What is varied: rows of a matrix product or norm, sequences of attention, queries at once, parts that its keys come in."""


@dataclass(frozen=True, kw_only=True)
class OperationsRequest:
    """Run `probe` (one row) once, record what each operation is given, and run each again at every size in `sizes`.

    `splits` are the numbers of parts that the keys of attention are reduced in.
    """

    probe: Probe
    sizes: tuple[int, ...]
    splits: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation and the bits of one and the same row of its result at each size.

    `name` is the module's path or the function, `kind` its class, `like_it` how many others have the same class and shapes
    and were not run. `hashes` is `[size]`, in the order of `sizes`. `relative` is the largest difference to the result at
    the first size, over the largest number of that result.
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
    """Operations in the order in which the model ran them first."""

    operations: tuple[Operation, ...]
    not_tested: tuple[NotTested, ...] = field(default_factory=tuple)
