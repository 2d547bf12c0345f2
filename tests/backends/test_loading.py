"""A live model's texts are tokenised by the checkpoint of the audit, whatever the user's own hub cache has under its name."""

from __future__ import annotations

from parity_audit.backends.loading import own_tokenizer, tokenization, tokenizer_error
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest
from parity_audit.specs.tokenizer import BOS, write_tokenizer


def test_the_directory_is_read_and_not_the_name(tmp_path):
    write_tokenizer(tmp_path, 300)
    checkpoint = Checkpoint(repo_id="no-such/model", path=str(tmp_path), by_name=True, hf_home=str(tmp_path / "other"))
    request = LoadRequest(checkpoint=checkpoint, dtype="float32", device="cpu", tokenize=("the fox",))

    assert tokenization(request)["the fox"][0] == BOS


def test_a_tokenizer_that_cannot_be_loaded_is_no_failure_and_says_why(tmp_path):
    """`tokenizers` raises a bare Exception for a file of a newer release."""
    bare, broken = tmp_path / "bare", tmp_path / "broken"
    bare.mkdir()
    broken.mkdir()
    write_tokenizer(broken, 300)
    (broken / "tokenizer.json").write_text('{"model": {"type": "of the future"}}')
    without, with_one = (Checkpoint(repo_id="no-such/model", path=str(folder)) for folder in (bare, broken))

    assert own_tokenizer(without.path) is own_tokenizer(with_one.path) is None
    assert tokenizer_error(without) == ""
    assert tokenizer_error(with_one) != ""
