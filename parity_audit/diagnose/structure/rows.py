"""Find which rows of the embedding table enter block 0: embed / |embed| = W_E[other] / |W_E[other]|."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real
from parity_audit.diagnose.thresholds import SAME_VALUE

KNOB = "embed.rows"
OWN_ROWS = "each token's own"


def read(evidence: Evidence) -> list[Outcome]:
    """Return a fit that says which rows of the table the token embeddings are: each token's own, or others."""
    table = evidence.weight("embed") if evidence.layer is None else None
    shown = [
        (probe, out) for probe in evidence.short_probes() if (out := evidence.tensor(probe.name, "embed")) is not None
    ]
    if table is None or not shown:
        return [] if evidence.layer is not None else [gap(evidence, KNOB, "embed or its weight is not visible")]
    tokens = torch.cat([torch.tensor(probe.token_ids)[real(probe)] for probe, _ in shown])
    whose = _whose(table, tokens, torch.cat([f64(out[real(probe)]) for probe, out in shown]))
    if whose is None:
        return [gap(evidence, KNOB, "what enters is no multiple of the checkpoint's rows")]
    return [KnobFit(knob=KNOB, layer=None, value=whose, stderr=None, residual=SAME_VALUE, n=len(tokens), site="embed")]


def _whose(table: Tensor, tokens: Tensor, embed: Tensor) -> str | None:
    """Describe the rows of the table that the embeddings `[token d_model]` are multiples of; None if one is no
    multiple of a row."""
    rows, seen = functional.normalize(table.float()), functional.normalize(embed)
    other = (seen.float() @ rows.T).argmax(1)
    if float((functional.normalize(f64(table[other])) - seen).norm(dim=1).max()) > SAME_VALUE:
        return None
    steps = set((other - tokens).tolist())
    wrong = int((other != tokens).sum())
    if not wrong:
        return OWN_ROWS
    return (
        f"those of token id {steps.pop():+d}" if len(steps) == 1 else f"another's for {wrong} of {len(tokens)} tokens"
    )
