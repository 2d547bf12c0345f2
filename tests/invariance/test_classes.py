"""Classes of equal bits and how they are printed."""

from __future__ import annotations

import pytest

from parity_audit.invariance.classes import classes_of, name_words, size_words, switches
from parity_audit.invariance.conditions import batch_sizes, chunk_sizes

SIZES = ("1", "2", "3", "4", "5", "7", "8", "9")


@pytest.mark.parametrize(
    ("bits", "words", "at"),
    [
        ("aaaaaaaa", "{>=1}", ()),
        ("abbccccc", "{1} {2,3} {>=4}", (2, 4)),
        ("aabbbbba", "{1,2,9} {3-8}", (3, 9)),
        ("abcdefgh", "{1} {2} {3} {4} {5} {7} {8} {9}", (2, 3, 4, 5, 7, 8, 9)),
        ("abababab", "{1,3,5,8} {2,4,7,9}", (2, 3, 4, 5, 7, 8, 9)),
    ],
)
def test_sizes_with_equal_bits_stand_together(bits, words, at):
    assert size_words(classes_of(SIZES, bits)) == words
    assert switches([int(size) for size in SIZES], bits) == at


def test_named_conditions_stand_behind_the_one_they_equal():
    assert name_words(classes_of(["alone", "first", "last"], "aba")) == "{alone; last} {first}"


def test_batches_surround_every_power_of_two():
    assert batch_sizes(9) == (1, 2, 3, 4, 5, 7, 8, 9)
    assert set(batch_sizes(256)) >= {15, 16, 17, 127, 128, 129, 255, 256}
    assert max(batch_sizes(256)) == 256


def test_chunks_leave_tails_of_one_two_and_more_tokens():
    tails = {29 % size for size in chunk_sizes(29, 16)}

    assert {1, 2, 5} <= tails
    assert {15, 16, 17} <= set(chunk_sizes(29, 16))
    assert all(1 < size < 29 for size in chunk_sizes(29, 16))
