"""Embedding: what enters block 0 over the checkpoint's row, embed = scale * W_E[token] (least squares).

Where that does not explain it, the rows themselves are looked for: embed / |embed| = W_E[other] / |W_E[other]|.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms
from parity_audit.diagnose.identify.least_squares import ratio
from parity_audit.diagnose.thresholds import EXPLAINED

KNOB, ROWS = "embed.scale", "embed.rows"
OWN_ROWS = "each token's own"
SAME_ROW = 1e-4


def fit(evidence: Evidence) -> list[Outcome]:
    """The factor on the token embeddings."""
    if evidence.layer is not None:
        return []
    table = evidence.weight("embed")
    if table is None:
        return [gap(evidence, KNOB, "no checkpoint weight for the embedding")]
    ids, outs = [], []
    for probe in evidence.short_probes():
        out = evidence.tensor(probe.name, "embed")
        if out is not None:
            kept = real(probe)
            ids.append(torch.tensor(probe.token_ids)[kept])
            outs.append(f64(out[kept]))
    if not ids:
        return [gap(evidence, KNOB, "embed is not visible")]
    tokens, y = torch.cat(ids), torch.cat(outs)
    x = f64(table[tokens])
    estimate = ratio(x, y)
    scale, stderr = float(estimate.value[0]), float(estimate.stderr[0])
    left = relative_rms(y - scale * x, y)
    whose = OWN_ROWS if left <= EXPLAINED else _whose(table, tokens, y)
    found = [] if whose is None else [KnobFit(
        knob=ROWS, layer=None, value=whose, stderr=None, residual=min(left, SAME_ROW), n=estimate.n, site="embed"
    )]  # fmt: skip
    if left > EXPLAINED:
        return [*found, gap(evidence, KNOB, f"embed is not a multiple of the checkpoint's rows: {left:.2g} left")]
    return [*found, KnobFit(
        knob=KNOB, layer=None, value=scale, stderr=stderr, residual=left, n=estimate.n, site="embed"
    )]  # fmt: skip


def _whose(table: Tensor, tokens: Tensor, embed: Tensor) -> str | None:
    """Whose rows `[token d_model]` these are, where each is a multiple of a row of the table; None where one is not."""
    rows, seen = functional.normalize(table.float()), functional.normalize(embed)
    other = (seen.float() @ rows.T).argmax(1)
    if float((functional.normalize(f64(table[other])) - seen).norm(dim=1).max()) > SAME_ROW:
        return None
    steps = set((other - tokens).tolist())
    wrong = int((other != tokens).sum())
    return (
        f"those of token id {steps.pop():+d}" if len(steps) == 1 else f"another's for {wrong} of {len(tokens)} tokens"
    )
