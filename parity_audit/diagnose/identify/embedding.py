"""Embedding scale: what enters block 0 over the checkpoint's row, embed = scale * W_E[token] (least squares)."""

from __future__ import annotations

import torch

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms
from parity_audit.diagnose.identify.least_squares import ratio

KNOB = "embed.scale"
EXPLAINED = 0.05


def fit(evidence: Evidence) -> list[Outcome]:
    """The factor on the token embeddings."""
    if evidence.layer is not None:
        return []
    table = evidence.weight("embed")
    if table is None:
        return [gap(evidence, KNOB, "no checkpoint weight for the embedding")]
    rows, outs = [], []
    for probe in evidence.short_probes():
        out = evidence.tensor(probe.name, "embed")
        if out is not None:
            kept = real(probe)
            rows.append(f64(table[torch.tensor(probe.token_ids)[kept]]))
            outs.append(f64(out[kept]))
    if not rows:
        return [gap(evidence, KNOB, "embed is not visible")]
    x, y = torch.cat(rows), torch.cat(outs)
    estimate = ratio(x, y)
    scale, stderr = float(estimate.value[0]), float(estimate.stderr[0])
    left = relative_rms(y - scale * x, y)
    if left > EXPLAINED:
        return [gap(evidence, KNOB, f"embed is not a multiple of the checkpoint's rows: {left:.2g} left")]
    return [KnobFit(
        knob=KNOB, layer=None, value=scale, stderr=stderr, residual=left, n=estimate.n, site="embed"
    )]  # fmt: skip
