"""Keys as attention is given them, with a head for each query head: which of the model's own heads each one holds."""

import pytest
import torch

from parity_audit.backends.attention import _heads_held

KEYS = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("held", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0, 1, 1]])
def test_repeated_heads_are_told_however_they_are_repeated(held):
    assert _heads_held(KEYS[:, held], 2) == held


def test_a_head_that_is_not_a_number_is_itself():
    keys = KEYS.clone()
    keys[0, 1, 3] = float("nan")

    assert _heads_held(keys[:, [0, 0, 1, 1]], 2) == [0, 0, 1, 1]


def test_two_equal_heads_are_two_heads():
    assert _heads_held(KEYS[:, [0, 0, 0, 0]], 2) == [0, 0, 1, 1]


def test_other_keys_than_repeated_ones_are_none():
    assert _heads_held(torch.randn(2, 4, 5, 4, generator=torch.Generator().manual_seed(1)), 2) is None
