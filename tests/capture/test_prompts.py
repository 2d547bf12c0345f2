"""A user's own prompts become rows of probes."""

import json

import pytest

from parity_audit.capture.prompts import own_prompts, prompt_probes, prompts_of
from parity_audit.core.errors import UsageError

TEXTS = ["The quick brown fox", "A port is right", "x"]


def test_texts_chats_and_ids_of_a_file(tmp_path, llama):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([json.dumps({"text": TEXTS[0]}), json.dumps({"token_ids": [2, 9, 8]}), "[5, 6]"]))
    text, ids, bare = prompts_of(file, llama)

    assert text.text == TEXTS[0]
    assert text.ids[0] == 2
    assert (ids.ids, bare.ids, ids.text) == ((2, 9, 8), (5, 6), None)


def test_rows_are_padded_on_the_right_and_masked(llama):
    prompts = own_prompts(TEXTS * 4, None, llama, vocab=512)
    first, second = prompt_probes(prompts)

    assert (first.name, second.name) == ("prompts", "prompts-2")
    assert len(first.token_ids), len(second.token_ids) == (8, 4)
    for row, mask, prompt in zip(first.token_ids, first.mask, prompts, strict=False):
        assert row[: len(prompt.ids)] == prompt.ids
        assert sum(mask) == len(prompt.ids)
        assert set(mask[len(prompt.ids) :]) <= {0}


@pytest.mark.parametrize(
    ("content", "said"),
    [("[600]", "the token id 600"), ("", "empty prompt, or none"), ("{}", "neither"), ("{", "not valid JSON")],
)
def test_what_cannot_be_run_is_refused(tmp_path, llama, content, said):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)

    with pytest.raises(UsageError, match=said):
        own_prompts((), file, llama, vocab=512)


def test_no_chat_template(llama):
    with pytest.raises(UsageError, match="no chat template"):
        own_prompts(TEXTS, None, llama, vocab=512, chat=True)
