"""What is read off one token at a time: where tokens stand, and where an error begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parity_audit.diagnose.fit.by_token import first_wrong, positions_one_by_one
from parity_audit.formulas.choices import numbers_in

LENGTH, ROUNDING = 40, 1e-6
PLACES = torch.arange(LENGTH)
TABLE = torch.randn(3 * LENGTH, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def off_by(rows: Tensor):
    """Formula minus capture of a table of which a program takes these rows, for all tokens at one place."""

    def difference(said: str) -> Tensor:
        (place, _) = numbers_in(said, "all at {} from token {} on")
        return (TABLE[place] - TABLE[rows]).flatten()

    return difference


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        (PLACES.clamp_max(20), 0, "stop at 20"),
        (PLACES.clamp_max(20) + 2, 2, "stop at 20 + 2"),
        (PLACES % 16 + 2, 2, "start again after 15 + 2"),
        (torch.where(PLACES >= 10, PLACES + 5, PLACES) + 2, 2, "+5 from token 10 on + 2"),
    ],
)
def test_words_are_found_beside_what_a_model_adds_anyway(rows: Tensor, more: int, words: str):
    assert next(positions_one_by_one(off_by(rows), PLACES, more)) == words


def test_tokens_one_by_one_are_only_told_where_a_model_adds_nothing():
    odd = torch.where(PLACES == 7, 3, PLACES)

    assert list(positions_one_by_one(off_by(odd), PLACES)) == [{"token 7": 3}]
    assert list(positions_one_by_one(off_by(odd + 2), PLACES, 2)) == []


@pytest.mark.parametrize(("first", "size", "told"), [(17, 1e-3, 17), (17, 1e-8, None), (0, 1e-3, None)])
def test_an_error_begins_where_more_than_rounding_is_left(first: int, size: float, told: int | None):
    off = torch.full((LENGTH, 8), 1e-9)
    off[first:] = size

    assert first_wrong(off.flatten(), PLACES, ROUNDING) == told
