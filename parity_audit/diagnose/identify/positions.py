"""Learned positions: which row of the table does each token add, and how much of it?

With the table P `[row d_model]` and what is added p `[token d_model]` (seen at its own site, or as what block 0 reads
minus the embedding), the row of a token is the one that points where p does:

- pos_embed.offset: row minus position, where that is one number for all tokens; "counted from the padding" where it is
  the number of padding tokens on the left;
- pos_embed.scale: s in p = s P[row], by least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue, Probe
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms
from parity_audit.diagnose.identify.least_squares import ratio
from parity_audit.diagnose.identify.rotary.positions import where_they_stand
from parity_audit.diagnose.thresholds import EXPLAINED

SITE, OFFSET, SCALE = "pos_embed", "pos_embed.offset", "pos_embed.scale"
FROM_PADDING = "counted from the padding"
EXACT = 1e-6


def fit(evidence: Evidence) -> list[Outcome]:
    """Offset and factor of the position table; nothing where the architecture has none."""
    table = evidence.weight(SITE) if evidence.layer is None else None
    if table is None:
        return []
    found = [(probe, seen) for probe in evidence.short_probes() if (seen := _added(evidence, probe)) is not None]
    if not found:
        return [gap(evidence, OFFSET, "what is added for positions is not visible")]
    added = torch.cat([seen[real(probe)] for probe, seen in found])
    rows = _rows(added, f64(table))
    chosen = f64(table)[rows]
    scale = ratio(chosen, added)
    left = relative_rms(added - float(scale.value[0]) * chosen, added)
    if left > EXPLAINED:
        return [gap(evidence, OFFSET, f"what is added for positions is no row of the table: {left:.2g} left")]
    offset = _offset(rows, [probe for probe, _ in found])
    numeric = isinstance(offset, int)
    return [
        KnobFit(knob=OFFSET, layer=None, value=offset, stderr=EXACT if numeric else None, residual=left, n=len(rows), site=SITE),
        KnobFit(
            knob=SCALE, layer=None, value=float(scale.value[0]), stderr=max(float(scale.stderr[0]), EXACT),
            residual=left, n=len(rows), site=SITE,
        ),
    ]  # fmt: skip


def _added(evidence: Evidence, probe: Probe) -> Tensor | None:
    """`[batch pos d_model]`: what is added to the embedding."""
    own = evidence.tensor(probe.name, SITE)
    if own is not None:
        return f64(own).expand(*probe.shape, -1)
    after, before = (evidence.tensor(probe.name, site) for site in ("blocks.0.resid_pre", "embed"))
    return None if after is None or before is None else f64(after) - f64(before)


def _rows(added: Tensor, table: Tensor) -> Tensor:
    """The row of the table that points where each token's vector does, `[token]`."""
    unit = table / table.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    nearest: Tensor = (added @ unit.T).argmax(-1)
    return nearest


def _offset(rows: Tensor, probes: list[Probe]) -> KnobValue:
    """What a row is more than its position."""
    masks = [real(probe) for probe in probes]
    positions = torch.cat([(mask.cumsum(1) - 1)[mask] for mask in masks])
    pads = torch.cat([(torch.arange(mask.shape[1]) - mask.cumsum(1) + 1)[mask] for mask in masks])
    if len(probes) == 1 and probes[0].decode_from is not None and not torch.equal(rows, positions):
        return where_they_stand(positions.double(), rows.double())
    offsets = sorted(set((rows - positions).tolist()))
    if len(offsets) == 1:
        return int(offsets[0])
    if torch.equal(rows, positions + pads):
        return FROM_PADDING
    return f"not one: {offsets[0]} to {offsets[-1]}"
