"""What usually goes wrong with a tokenizer is said in its words."""

import pytest

from parity_audit.checks.token_ids import how_ids_differ

BOS = 2
TEXT = [40, 41, 300, 42]


@pytest.mark.parametrize(
    ("reference", "candidate", "said"),
    [
        ([BOS, *TEXT], [BOS, BOS, *TEXT], "BOS (2) stands twice at the start"),
        ([BOS, *TEXT], TEXT, "BOS (2) is missing at the start"),
        (TEXT, [BOS, *TEXT], "BOS (2) is put in front"),
        ([BOS, *TEXT], [BOS, 40, 41, 301, 42], "token ids from 300 on are shifted by +1"),
        ([BOS, *TEXT], [BOS, 7, 8, *TEXT, 9], "the chat template adds 3 tokens before and 1 behind"),
        ([BOS, 7, 8, *TEXT, 9], TEXT, "the chat template leaves out 3 tokens before and 1 behind"),
        ([BOS, *TEXT], [BOS, 40, 77, 300], "they differ from position 2 on, 5 and 4 tokens"),
    ],
)
def test_it_is_named(reference, candidate, said):
    assert said in how_ids_differ(reference, candidate, BOS)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ([BOS, 7, 8, *TEXT, 9], [BOS, 10, 11, 12, *TEXT, 13, 14]),
        ([7, 8, 9, *TEXT, 9], [10, 11, 12, 13, *TEXT, 13, 14]),
    ],
)
def test_two_templates_around_one_message_are_told_apart(reference, candidate):
    said = how_ids_differ(reference, candidate, BOS, chat=True)

    assert "puts 4 tokens before and 2 behind the same 4 tokens of the message, the reference's 3 and 1" in said
    assert "differ from position" in how_ids_differ(reference, candidate, BOS)


def test_rows_without_a_message_in_common_are_no_templates():
    assert "differ from position" in how_ids_differ([BOS, 7, 8, 9], [BOS, 10, 20, 12], BOS, chat=True)
