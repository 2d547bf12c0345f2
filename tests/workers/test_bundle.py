"""The worker program on disk is that of this release, byte for byte, or it is written again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from parity_audit.core.errors import NotJudged
from parity_audit.workers.bundle import bundle


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "workers"


def starts(path):
    code = f"import sys; sys.path.insert(0, {str(path)!r}); import parity_audit.backends.serve"
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True).returncode == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 100), lambda path: path.write_bytes(b"")])
def test_a_damaged_one_is_set_aside_and_written_again(folder, damage, caplog):
    made = bundle(folder)
    good = made.read_bytes()
    damage(made)
    with caplog.at_level(logging.WARNING, "parity_audit"):
        again = bundle(folder)

    assert (again, again.read_bytes()) == (made, good)
    assert starts(again)
    assert "the worker" in caplog.text
    assert [path.name for path in folder.iterdir()] == [made.name]


def test_an_intact_one_is_used(folder, caplog):
    before = bundle(folder).stat()

    assert os.path.samestat(before, bundle(folder).stat())
    assert caplog.text == ""


def test_a_place_that_cannot_be_written_is_a_clear_error(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")

    with pytest.raises(NotJudged, match="cannot write the worker program") as caught:
        bundle(folder)
    assert caught.value.code == "disk"
