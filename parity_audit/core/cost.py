"""What an audit will need, as its JSON carries it."""

from __future__ import annotations

from dataclasses import dataclass

from parity_audit.core.types import NotTested

COST_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """One probe. `tokens` of all rows; `native_bytes` and `float64_bytes` are what one capture of it takes on disk."""

    name: str
    tokens: int
    native_bytes: int
    float64_bytes: int

    @property
    def audit_bytes(self) -> int:
        """Captures of the reference, its judge and one candidate."""
        return 2 * self.native_bytes + self.float64_bytes


@dataclass(frozen=True, kw_only=True)
class AuditCost:
    """One audit before anything is loaded.

    `memory_bytes`: the weights of one model and the logits of its longest probe, since one model is held at a time.
    `disk_bytes`: captures of the reference, its judge and one candidate, which are on disk together. `active`: the parameters
    that one token meets, which of a mixture are those of the chosen experts. `operations`: multiplications and additions of
    these three runs. `seconds`: these operations at the speed that a product of two matrices had here, without loading.
    `free_*`: what this machine has of each now. `fits`: whether both suffice.
    `most_disk_bytes`: the same with the replays and the patched run that a candidate which departs asks for, at most;
    `disk_bound_bytes`: the bound that was asked for, and `left_out` what is not run because of it or of `--quick`.
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
