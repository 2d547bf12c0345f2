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
