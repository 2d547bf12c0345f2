"""Embedding: whose rows of the checkpoint's table enter block 0, where those are not each token's own times a factor.

A row is another token's where embed / |embed| = W_E[other] / |W_E[other]|.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real

ROWS = "embed.rows"
OWN_ROWS = "each token's own"
SAME_ROW = 1e-4


def fit(evidence: Evidence) -> list[Outcome]:
    """Whose rows the token embeddings are."""
    if evidence.layer is not None:
        return []
    table = evidence.weight("embed")
    if table is None:
        return [gap(evidence, ROWS, "no checkpoint weight for the embedding")]
    ids, outs = [], []
    for probe in evidence.short_probes():
        out = evidence.tensor(probe.name, "embed")
        if out is not None:
            kept = real(probe)
            ids.append(torch.tensor(probe.token_ids)[kept])
            outs.append(f64(out[kept]))
    if not ids:
        return [gap(evidence, ROWS, "embed is not visible")]
    whose = _whose(table, torch.cat(ids), torch.cat(outs))
    if whose is None:
        return [gap(evidence, ROWS, "embed is not made of multiples of the checkpoint's rows")]
    return [
        KnobFit(knob=ROWS, layer=None, value=whose, stderr=None, residual=SAME_ROW, n=len(torch.cat(ids)), site="embed")
    ]


def _whose(table: Tensor, tokens: Tensor, embed: Tensor) -> str | None:
    """Whose rows `[token d_model]` these are, where each is a multiple of a row of the table; None where one is not."""
    rows, seen = functional.normalize(table.float()), functional.normalize(embed)
    other = (seen.float() @ rows.T).argmax(1)
    if float((functional.normalize(f64(table[other])) - seen).norm(dim=1).max()) > SAME_ROW:
        return None
    steps = set((other - tokens).tolist())
    if steps == {0}:
        return OWN_ROWS
    wrong = int((other != tokens).sum())
    return (
        f"those of token id {steps.pop():+d}" if len(steps) == 1 else f"another's for {wrong} of {len(tokens)} tokens"
    )
