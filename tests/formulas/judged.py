"""A judge's capture beside the formulas that a spec describes, and how far two tensors of a site are apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import Architecture, Shown
from torch import Tensor

from parity_audit.core.types import Probe
from parity_audit.formulas.decoder import Run, decoder_of
from parity_audit.formulas.place import Batch, Decoder
from parity_audit.formulas.positions import counted
from parity_audit.formulas.stored import CheckpointTensors
from parity_audit.specs.facts import decoder_facts


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One probe in the judge, and the same probe as formulas: with its inputs given, and from token ids alone."""

    judge: Shown
    components: Run
    chain: Run
    real: Tensor


def batch_of(probe: Probe) -> Batch:
    mask = torch.tensor(probe.mask)
    return Batch(tokens=torch.tensor(probe.token_ids), mask=mask, positions=counted(mask))


def decoder(architecture: Architecture, dtype: torch.dtype = torch.float64) -> Decoder:
    stored = CheckpointTensors(Path(architecture.checkpoint.path))
    return decoder_of(decoder_facts(architecture.model.spec, architecture.config), stored, dtype)


def judged(architecture: Architecture) -> Judged:
    batch, made, judge = batch_of(architecture.probe), decoder(architecture), architecture.judge
    return Judged(
        judge=judge, components=Run(decoder=made, batch=batch, given=judge.sites.get), chain=Run(decoder=made, batch=batch),
        real=batch.mask.bool(),
    )  # fmt: skip


def apart(site: str, made: Tensor, judge: Tensor, real: Tensor) -> float:
    """Relative distance at real tokens; infinite where shapes or hidden keys differ."""
    if made.shape != judge.shape:
        return float("inf")
    if site.endswith(("attn_scores", "pattern")):
        made, judge = made.transpose(1, 2), judge.transpose(1, 2)
    made, judge = made[real], judge[real]
    if not torch.equal(made.isneginf(), judge.isneginf()):
        return float("inf")
    seen = judge.isfinite()
    return float((made[seen] - judge[seen]).norm() / judge[seen].norm())
