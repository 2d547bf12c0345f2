"""A law of attention that overflowed in a search is no start for the next one, and no error."""

import math

import pytest
import torch

from parity_audit.diagnose.identify.attention.law import Law
from parity_audit.diagnose.identify.attention.rows import Row
from parity_audit.diagnose.identify.attention.synthesis import queries_of
from parity_audit.diagnose.identify.attention.synthesis_heads import worth_trying

HEADS, POS, WIDTH = 2, 12, 8


@pytest.mark.parametrize("slope", [math.inf, math.nan, 1e308])
def test_a_law_that_overflowed_is_no_start(slope: float):
    draw = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(POS, HEADS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(4))
    row = Row(probe="short", batch=0, kept=torch.arange(POS), q=q, k=k, v=v, z=z)
    law = Law(
        slope=torch.full((HEADS,), slope, dtype=torch.float64), w=0.0, alibi=torch.zeros(HEADS, dtype=torch.float64),
        sink=torch.zeros(HEADS, dtype=torch.float64),
    )  # fmt: skip

    assert worth_trying([queries_of(row, range(HEADS), torch.arange(1, POS), None)], law) is False
