"""Probes reach what they say: both ends of the vocabulary, special ids, batches, tiny texts, and a second use."""

from __future__ import annotations

import json

import pytest
import torch

from parity_audit.capture.probes import (
    AGAIN,
    BATCH,
    EDGE_IDS,
    EXACT_IN_BFLOAT16,
    FIRST,
    MOST_SPECIAL,
    PAST_THRESHOLD,
    TWIN,
    edge_ids,
    plan_probes,
)
from parity_audit.specs.special_tokens import special_ids

CONFIG = {"vocab_size": 515, "bos_token_id": 2, "sliding_window": 64, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def probes():
    return {probe.name: probe for probe in plan_probes(CONFIG, special=(0, 2, 300, 9000))}


def test_every_low_special_and_last_id_is_run_once(probes):
    (row,) = probes["ids"].token_ids

    assert row[0] == 2
    assert set(row) == {*range(8), 300, *range(507, 515)}
    assert len(set(row)) == len(row)


def test_of_thousands_of_special_ids_the_first_and_the_last_are_run():
    row = edge_ids(range(1000, 8000), vocab=10000, bos=None)

    assert len(row) == 2 * EDGE_IDS + MOST_SPECIAL
    assert {1000, 1047, 7952, 7999} <= set(row)


def test_a_vocabulary_smaller_than_its_ends_is_run_whole():
    assert sorted(edge_ids((), vocab=5, bos=1)) == list(range(5))


def test_a_batch_of_eight_has_other_rows_and_one_that_the_first_probe_has_alone(probes):
    rows = probes[BATCH].token_ids

    assert len(rows) >= 8
    assert len(set(rows)) == len(rows)
    assert rows[TWIN] == probes[FIRST].token_ids[0][: len(rows[0])]
    assert all(all(row) for row in probes[BATCH].mask)


def test_prompts_that_are_padded_on_the_left_are_decoded_together(probes):
    """Each of the two rows has a prompt, and as many decoded tokens as the other."""
    batch = probes["decode_batch"]
    real = torch.tensor(batch.mask).bool()

    assert real.all(1).tolist() == [True, False]
    assert real[:, -1].all()
    assert real[:, : batch.decode_from].sum(1).min() >= 2
    assert real[:, batch.decode_from :].all()
    assert (batch.at_once, batch.sites) == (1, "all")


def test_a_prompt_goes_on_with_several_tokens_at_once_and_nothing_else(probes):
    continued = probes["continued"]

    assert all(all(row) for row in continued.mask)
    assert 1 < continued.at_once == continued.shape[1] - continued.decode_from


def test_texts_of_one_and_two_tokens_and_the_first_probe_again_at_the_very_end(probes):
    assert probes["one"].shape == (1, 1)
    assert probes["two"].shape == (1, 2)
    assert probes[AGAIN].token_ids == probes[FIRST].token_ids
    assert list(probes)[-1] == AGAIN
    assert list(probes).index("long") < list(probes).index(AGAIN)


def test_they_are_cheap(probes):
    """Fewer tokens than the probes that look at every site, and the residual stream alone."""
    tokens = {name: len(probe.token_ids) * len(probe.token_ids[0]) for name, probe in probes.items()}
    added = {"ids", BATCH, "one", "two", AGAIN}

    assert sum(tokens[name] for name in added) < sum(tokens[name] for name in set(tokens) - added - {"long"})
    assert all(probes[name].sites == "residual" for name in added)


def test_special_ids_are_those_of_the_config_and_the_tokenizer(tmp_path):
    added = [{"id": 7, "special": True}, {"id": 40, "special": False}, {"id": 300, "special": True}, "nonsense"]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    config = {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": None, "vocab_size": 515}

    assert special_ids(tmp_path, config) == (1, 2, 7, 106, 300)


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"max_position_embeddings": 1024}, 320),
        ({"max_position_embeddings": 320}, 320),
        ({"max_position_embeddings": 319}, 0),
        ({}, 320),  # ALiBi has no limit
        ({"max_position_embeddings": 1024, "sliding_window": 64}, 320),
        ({"max_position_embeddings": 8192, "sliding_window": 4096}, 4160),
        ({"max_position_embeddings": 8192, "sliding_window": 8192}, 320),
    ],
)
def test_a_long_text_passes_every_threshold_within_the_positions_of_the_model(limits, length):
    probes = {probe.name: probe for probe in plan_probes({"vocab_size": 515, "bos_token_id": 2, **limits})}

    assert ("long" in probes) == (length > 0)
    if length:
        assert probes["long"].shape == (1, length)
        assert str(length - PAST_THRESHOLD) in probes["long"].purpose


def test_a_narrow_dtype_holds_every_position_up_to_there_and_no_further():
    positions = torch.arange(EXACT_IN_BFLOAT16 + 2)

    assert (positions.bfloat16().long() != positions).nonzero().flatten().tolist() == [EXACT_IN_BFLOAT16 + 1]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"added_tokens": 3}'])
def test_a_tokenizer_that_cannot_be_read_names_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    assert special_ids(tmp_path, {"eos_token_id": 5}) == (5,)
