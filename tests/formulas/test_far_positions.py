"""What positions far in a text become: rows of a table and penalties for distance, against closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from parity_audit.formulas.alibi import penalties, standard_slopes
from parity_audit.formulas.choices import FROM_PADDING
from parity_audit.formulas.place import Batch
from parity_audit.formulas.positions import assigned_positions, counted

LENGTH = 320
SLOPES = torch.tensor(standard_slopes(4), dtype=torch.float64)


@pytest.fixture
def batch() -> Batch:
    """A text without padding, and the same with three tokens of padding before it."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    return Batch(tokens=torch.zeros_like(mask), mask=mask, positions=counted(mask))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("rounded to bfloat16", {256: 256, 257: 256, 258: 258, 259: 260, 261: 260, 319: 320}),
        ("rounded to float16", {257: 257, 319: 319}),
        ("stop at 149 + 2", {0: 2, 149: 151, 150: 151, 319: 151}),
        ("rounded to bfloat16 + 2", {0: 2, 256: 258, 257: 258, 319: 322}),
    ],
)
def test_rows_of_a_table(batch: Batch, said: str, expected: dict[int, int]):
    rows = assigned_positions(batch, said)[0]

    assert {place: int(rows[place]) for place in expected} == expected


@pytest.mark.parametrize(
    ("said", "decoded"),
    [("start again after 7", [2, 3]), ("stop at 8", [8, 8]), ("0 at decoded tokens", [0, 0])],
)
def test_what_is_said_of_far_positions_holds_of_decoded_tokens_alone(batch: Batch, said: str, decoded: list[int]):
    rows = assigned_positions(dataclasses.replace(batch, decoded_from=10), said)[0]

    assert rows[:12].tolist() == [*range(10), *decoded]


def test_rows_that_are_counted_from_the_padding_have_what_the_model_adds(batch: Batch):
    assert assigned_positions(batch, "counted from the padding + 2")[1].tolist() == list(range(2, LENGTH + 2))


def test_a_softmax_sees_no_difference_between_positions_and_distances(batch: Batch):
    by_position, by_distance = (
        penalties(SLOPES, batch.positions, batch.positions, arithmetic=said)
        for said in ("full", "float64 distances")
    )  # fmt: skip
    constant = (by_distance - by_position).expand(-1, -1, LENGTH, -1)

    assert by_distance[0, 1, 10, 7] == pytest.approx(-3 * 2.0**-4, rel=1e-15)
    assert (constant.amax(-1) - constant.amin(-1)).max() < 1e-12


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("bfloat16 positions", [257, 259, 261]),
        ("bfloat16 penalties", [257, 259, 261]),  # slopes of four heads are powers of two
        ("float16 positions", []),
    ],
)
def test_penalties_of_rounded_positions(batch: Batch, said: str, wrong: list[int]):
    exact, made = (
        penalties(SLOPES, batch.positions[:1], batch.positions[:1], arithmetic=one)[0, 0, 0] for one in ("full", said)
    )

    off = (made != exact).nonzero().flatten().tolist()
    assert off[:3] == wrong
    assert all(place > 256 for place in off)


@pytest.mark.parametrize("said", ["bfloat16 distances", "bfloat16 penalties of distances"])
def test_penalties_of_rounded_distances_are_wrong_far_from_the_query_alone(batch: Batch, said: str):
    exact, made = (
        penalties(SLOPES, batch.positions[:1], batch.positions[:1], arithmetic=one)[0, 0, LENGTH - 1]
        for one in ("full distances", said)
    )

    assert (made != exact).nonzero().flatten().tolist() == [
        key for key in range(LENGTH) if float(torch.tensor(float(LENGTH - 1 - key)).bfloat16()) != LENGTH - 1 - key
    ]


@pytest.mark.parametrize("said", [FROM_PADDING, 2])
def test_tokens_out_of_a_longer_text_stand_where_they_stand_in_it(batch: Batch, said: str | int):
    shown = torch.tensor([0, 5, 300, 319])
    own = {name: getattr(batch, name)[:, shown] for name in ("tokens", "mask", "positions")}
    some = Batch(**own, shown=shown)

    assert torch.equal(some.places, batch.places[:, shown])
    assert torch.equal(assigned_positions(some, said), assigned_positions(batch, said)[:, shown])
