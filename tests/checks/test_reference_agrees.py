"""The twisted batch of the self-check, and its measure, on programs of which the answer is known."""

import pytest
import torch

from parity_audit.checks.reference_agrees import apart, causality_and_padding_probe
from parity_audit.core.types import Probe

ROW = tuple(range(10, 58))
PROBE = Probe(name="short", purpose="", token_ids=(ROW,), mask=((1,) * 48,))


@pytest.mark.parametrize("length", [2, 9, 48])
def test_the_rows_share_a_past_and_nothing_else(length):
    row = ROW[:length]
    probe, half = causality_and_padding_probe(Probe(name="short", purpose="", token_ids=(row,), mask=((1,) * length,)))
    future, padded = probe.token_ids

    assert probe.shape == (2, length)
    assert future[:half] == row[:half] == padded[-half:]
    assert future[half:] != row[half:]
    assert set(future) <= set(row)
    assert probe.mask[1] == (0,) * (length - half) + (1,) * half


def logits(ids, mask, *, causal, counts_padding):
    """A toy model: each position sums an embedding over what it attends to, plus its own position's."""
    tokens, seen = torch.tensor(ids, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)
    positions = torch.arange(tokens.shape[1], dtype=torch.float64) if counts_padding else seen.cumsum(1) - 1
    reach = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.float64)
    weights = (reach.tril() if causal else reach) * seen[:, None]
    attended = torch.einsum("bqk,bk->bq", weights, tokens.sin()) / weights.sum(-1).clamp(min=1)
    return torch.stack([(attended + positions * scale).cos() for scale in (0.1, 0.7, 1.3)], dim=-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts_padding", [True, False])
def test_what_looks_ahead_or_counts_padding_is_told_from_what_does_not(causal, counts_padding):
    options = {"causal": causal, "counts_padding": counts_padding}
    changed, half = causality_and_padding_probe(PROBE)
    exact = logits(PROBE.token_ids, PROBE.mask, **options)[0]
    own = exact.float().double()
    seen = logits(changed.token_ids, changed.mask, **options).float().double()

    assert (apart(seen[0, :half], own[:half], exact[:half], "float32") > 16) is not causal
    moved = apart(seen[1, -half:], own[:half], exact[:half], "float32") > 16
    assert moved is (counts_padding or not causal)
