"""Files are replaced whole or stay as they were."""

import os

import pytest

from parity_audit.core.whole_file import write_whole


@pytest.mark.parametrize("content", ["naïve µ\n", b"\x00\xff"])
def test_it_is_there_with_the_directories_above_it_and_nothing_beside_it(content, tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    for _ in range(2):
        write_whole(path, content)

    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_put_in_place_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_whole(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
