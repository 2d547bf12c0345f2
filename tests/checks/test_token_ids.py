"""What usually goes wrong with a tokenizer is said in its words, once for all texts that show it."""

import pytest

from parity_audit.checks.token_ids import SpecialTokens, TwoRows, how_ids_differ, special_tokens, ways_they_differ

BOS, EOS, PAD = 2, 3, 0
SPECIAL = SpecialTokens(BOS, {BOS: "BOS", EOS: "EOS", PAD: "padding"})
TEXT = [40, 41, 300, 42]


@pytest.mark.parametrize(
    ("reference", "candidate", "said"),
    [
        ([BOS, *TEXT], [BOS, BOS, *TEXT], "BOS (2) stands twice at the start"),
        ([BOS, *TEXT], [BOS, BOS, BOS, *TEXT], "BOS (2) stands 3 times at the start"),
        ([BOS, *TEXT], TEXT, "BOS (2) is missing at the start"),
        (TEXT, [BOS, *TEXT], "BOS (2) is put in front"),
        ([BOS, *TEXT], [BOS, *TEXT, EOS], "EOS (3) is put at the end"),
        ([BOS, *TEXT, EOS], [BOS, *TEXT], "EOS (3) is missing at the end"),
        ([BOS, *TEXT], [BOS, *TEXT, PAD, PAD, PAD], "padding (0) is put 3 times at the end"),
        ([BOS, *TEXT], [PAD, PAD, BOS, *TEXT], "padding (0) is put 2 times in front"),
        ([BOS, *TEXT], [BOS, *TEXT[:-2]], "the last tokens are cut off, to a length of 3"),
        ([BOS, *TEXT], TEXT[2:], "the first tokens are cut off, to a length of 2"),
        ([BOS, *TEXT], [BOS, *TEXT[2:]], "the first tokens are cut off, to a length of 3"),
        ([BOS, *TEXT], [BOS, 40, 41, 301, 42], "token ids from 300 on are shifted by +1"),
        ([BOS, *TEXT], [BOS, 7, 8, *TEXT, 9], "the chat template adds 2 tokens before and 1 behind"),
        ([BOS, *TEXT], [7, 8, *TEXT, 9], "the chat template adds 2 tokens before and 1 behind"),
        ([BOS, 7, 8, *TEXT, 9], TEXT, "the chat template leaves out 3 tokens before and 1 behind"),
        ([BOS, *TEXT], [BOS, 40, 77, 300], "they differ from position 2 on, 5 and 4 tokens"),
        ([BOS, *TEXT], [], "they differ from position 0 on, 5 and 0 tokens"),
    ],
)
def test_it_is_named(reference, candidate, said):
    assert said in how_ids_differ(reference, candidate, SPECIAL)


@pytest.mark.parametrize(
    ("reference", "candidate", "before"),
    [
        ([BOS, 7, 8, *TEXT, 9], [BOS, 10, 11, 12, *TEXT, 13, 14], (3, 2)),
        ([7, 8, 9, *TEXT, 9], [10, 11, 12, 13, *TEXT, 13, 14], (4, 3)),
    ],
)
def test_two_templates_around_one_message_are_told_apart(reference, candidate, before):
    said = how_ids_differ(reference, candidate, SPECIAL, chat=True)

    theirs, ours = before
    assert (
        f"puts {theirs} tokens before and 2 behind the same 4 tokens of the message, the reference's {ours} and 1"
        in said
    )
    assert "differ from position" in how_ids_differ(reference, candidate, SPECIAL)


def test_rows_without_a_message_in_common_are_no_templates():
    assert "differ from position" in how_ids_differ([BOS, 7, 8, 9], [BOS, 10, 20, 12], SPECIAL, chat=True)


def test_special_tokens_are_those_of_the_config():
    special = special_tokens({"bos_token_id": 5, "eos_token_id": [5, 6], "pad_token_id": None})

    assert special == SpecialTokens(5, {5: "BOS", 6: "EOS"})
    assert special.words(6) == "EOS (6)"
    assert special.words(7) == "the token 7"


def test_texts_that_differ_alike_are_one_way():
    twice = [TwoRows(str(n), [BOS, n], [BOS, BOS, n]) for n in (40, 41, 42)]
    missing = [TwoRows("other", [BOS, 40], [40])]

    assert ways_they_differ([*missing, *twice], SPECIAL) == [
        ("BOS (2) stands twice at the start", twice), ("BOS (2) is missing at the start", missing),
    ]  # fmt: skip


def test_shifted_ids_begin_where_all_texts_together_say():
    rows = [TwoRows("a", [BOS, 310, 40], [BOS, 311, 40]), TwoRows("b", [BOS, 299, 305], [BOS, 299, 306])]

    ((words, same),) = ways_they_differ(rows, SPECIAL)

    assert "from 305 on are shifted by +1" in words
    assert same == rows


def test_ids_shifted_in_one_text_and_kept_in_another_are_said_of_each():
    rows = [TwoRows("a", [BOS, 300], [BOS, 301]), TwoRows("b", [BOS, 305, 400], [BOS, 305, 401])]

    assert [words.split(" (")[0] for words, _ in ways_they_differ(rows, SPECIAL)] == [
        "token ids from 300 on are shifted by +1", "token ids from 400 on are shifted by +1",
    ]  # fmt: skip


def test_no_more_ways_are_listed_than_say_something():
    rows = [TwoRows(str(n), [BOS, *range(40, 60)], [BOS, *range(40, 40 + n), 77, 78]) for n in range(1, 15)]

    assert len(ways_they_differ(rows, SPECIAL)) == 8
