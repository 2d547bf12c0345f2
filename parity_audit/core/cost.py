"""The estimated cost of an audit, as its JSON holds it."""

from __future__ import annotations

from dataclasses import dataclass

from parity_audit.core.types import NotTested

COST_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """One probe. `tokens` counts the tokens of all rows; `native_bytes` and `float64_bytes` are the disk space of
    one capture."""

    name: str
    tokens: int
    native_bytes: int
    float64_bytes: int

    @property
    def audit_bytes(self) -> int:
        """The disk space of the captures of the reference, its judge and one candidate."""
        return 2 * self.native_bytes + self.float64_bytes


@dataclass(frozen=True, kw_only=True)
class AuditCost:
    """The estimated cost of one audit, before anything is loaded.

    `active`: the parameters that one token uses; in a mixture of experts, those of the chosen experts only.
    `memory_bytes`: the weights of one model and the logits of its longest probe, since one model is in memory at a
    time. `disk_bytes`: the captures of the reference, its judge and one candidate, which are on disk together.
    `operations`: the multiplications and additions of these three runs. `seconds`: the time of these operations at the
    speed measured here for a product of two matrices, without loading. `free_memory_bytes`, `free_disk_bytes`: what
    this machine has free now. `fits`: whether both suffice.

    `most_disk_bytes`: an upper bound of the disk space, with the replays and the patched run that are needed if a
    candidate departs. `disk_bound_bytes`: the bound that was requested. `left_out`: what is not run because of that
    bound or of `--quick`.
    """

    schema_version: int = COST_SCHEMA_VERSION
    model: str
    architecture: str
    dtype: str
    parameters: int
    active: int
    probes: tuple[ProbeCost, ...]
    weight_bytes: int
    memory_bytes: int
    disk_bytes: int
    operations: float
    seconds: float
    free_memory_bytes: int
    free_disk_bytes: int
    fits: bool
    exit_code: int
    most_disk_bytes: int = 0
    disk_bound_bytes: int | None = None
    left_out: tuple[NotTested, ...] = ()
