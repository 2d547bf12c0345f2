"""What is said before anything is judged: live settings beside the spec's, and texts that a side did not tokenise."""

from dataclasses import replace

import pytest

from parity_audit.checks.preflight import config_warnings, token_findings
from parity_audit.checks.token_ids import SpecialTokens
from parity_audit.core.types import Description

BOS = SpecialTokens(2, {2: "BOS"})


@pytest.mark.parametrize(
    ("said", "live", "warned"),
    [
        (8.0, 8.0, False),
        ([None, None, 8.0], 8.0, False),  # two blocks have no such module
        ([None, None, 8.0], 4.0, True),
        ([8.0, None, 4.0], [8.0, 4.0], False),
        ([8.0, None, 4.0], [4.0, 8.0], True),
        ([None, 8.0], [None, 8.0], False),
        ([8.0, 16.0], [8.00000001, 16.0], False),  # kept in float32
        ([8.0, 16.0], [8.0, 16.1], True),
    ],
)
def test_a_live_setting_is_compared_in_the_layers_that_have_it(said, live, warned):
    assert bool(config_warnings({"attention.scale": said}, {"attention.scale": live}, "hf")) is warned


def side(tokenization):
    return Description(backend="python", package="p", version="1", settings={}, effective={}, tokenization=tokenization)


CHAT = '[{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("shown", "what", "why"),
    [
        ({}, "tokenization", "python shows no tokenizer here"),
        ({"a": [2, 5], "b": [2, 6]}, "chat template", "so that chat messages (1 of the prompts) were not compared"),
        ({"a": [2, 5], CHAT: [2]}, "tokenization", "did not tokenise 1 texts, 'b' the first"),
    ],
)
def test_texts_that_a_side_did_not_tokenise_are_one_gap(shown, what, why):
    reference = side({"a": [2, 5], "b": [2, 6], CHAT: [2]})
    said, warnings, (gap,) = token_findings(reference, side(shown), BOS)

    assert (said, warnings, gap.what) == ("", [], what)
    assert why in gap.why


def test_a_tokenizer_that_a_side_cannot_load_is_a_gap_with_the_reason():
    candidate = replace(side({}), tokenizer_error="ImportError: requires the protobuf library")
    _, _, (gap,) = token_findings(side({"a": [2, 5]}), candidate, BOS)

    assert gap.why == "python cannot load the checkpoint's tokenizer: ImportError: requires the protobuf library"


def test_a_warning_shows_the_ids_about_the_first_that_differs():
    ids = [2, *range(40, 60)]
    said, (warning,), gaps = token_findings(side({"a": ids}), side({"a": [*ids[:9], 99, *ids[10:]]}), BOS)

    assert said == "its tokenizer departs in 1 of 1 texts"
    assert "[..., 46, 47, 48, 49, 50, 51, 52, 53, ...] in the reference" in warning
    assert "[..., 46, 47, 99, 49" in warning
    assert gaps == []
