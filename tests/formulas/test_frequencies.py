"""Rotary tables against transformers' own functions."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parity_audit.formulas.frequencies import attention_factor, rope_table

PAIRS = 24
LONG = {"rope_type": "longrope", "short_factor": [1.0 + 0.02 * j for j in range(PAIRS)],
        "long_factor": [1.5 + 0.7 * j for j in range(PAIRS)], "original_max_position_embeddings": 4096}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    YARN, YARN | {"beta_fast": 16.0, "beta_slow": 2.0}, YARN | {"truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}, YARN | {"attention_factor": 1.7},
    LONG | {"factor": 32.0},
]  # fmt: skip


def of_transformers(scaling: dict[str, object], length: int | None = None, *, longest: int = 131072):
    config = LlamaConfig(
        hidden_size=2 * PAIRS * 4, num_attention_heads=4, max_position_embeddings=longest,
        rope_parameters={"rope_theta": 150000.0, **scaling},
    )  # fmt: skip
    table, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, device="cpu", seq_len=length)
    return pytest.approx(table.tolist(), rel=2e-6), pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: " ".join(map(str, scaling.values()))[:40])
def test_tables_are_those_of_transformers(scaling: dict[str, object]):
    table, factor = of_transformers(scaling)

    assert rope_table(150000.0, scaling, 2 * PAIRS) == table
    assert attention_factor(scaling) == factor


@pytest.mark.parametrize("length", [48, 4096, 4097])
def test_longrope_changes_beyond_the_original_context(length: int):
    assert (
        rope_table(150000.0, LONG | {"factor": 32.0}, 2 * PAIRS, length)
        == of_transformers(LONG | {"factor": 32.0}, length)[0]
    )


def test_longrope_takes_its_factor_from_two_lengths():
    given = LONG | {"max_position_embeddings": 131072}

    assert attention_factor(given) == of_transformers(LONG)[1]


@pytest.mark.parametrize("length", [48, 2048, 3000])
def test_dynamic_theta(length: int):
    scaling = {"rope_type": "dynamic", "factor": 4.0}

    own = rope_table(150000.0, scaling | {"max_position_embeddings": 2048}, 2 * PAIRS, length)

    assert own == of_transformers(scaling, length, longest=2048)[0]


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="unknown rope scaling `spiral`"):
        rope_table(10000.0, {"rope_type": "spiral"}, 8)


def test_a_proportional_table_turns_the_first_pairs_of_a_whole_head():
    """Against transformers: the frequencies are those of all pairs, and the rest stand still."""
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25}

    own = rope_table(150000.0, scaling, 2 * PAIRS)

    assert own == of_transformers(scaling)[0]
    assert own[6:] == [0.0] * (PAIRS - 6)
