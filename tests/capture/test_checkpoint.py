"""Backends get a copy of a miniature; one that writes to its checkpoint is named, and the next reads the right one."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from parity_audit.cache.contents import contents
from parity_audit.capture.checkpoint import guarded
from parity_audit.core.errors import NotJudged
from parity_audit.core.types import Checkpoint
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model


@pytest.fixture
def remake(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    return partial(miniature.make, resolve_model("gpt2"), root=tmp_path / "cache" / "synthetic")


@pytest.fixture
def guard(remake, tmp_path):
    return guarded(remake(), remake=remake, copies=tmp_path / "own")


def weights(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.path) / "model.safetensors"


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_is_given_is_a_copy(guard, remake):
    assert contents(Path(guard.checkpoint.path)) == contents(Path(remake().path))
    assert not weights(guard.checkpoint).samefile(weights(remake()))
    assert guard.checkpoint.fingerprint == remake().fingerprint
    assert str(guard.checkpoint.hf_home) in guard.checkpoint.path


@pytest.mark.parametrize("raises", [False, True])
def test_who_writes_to_it_is_named_and_the_next_one_reads_the_right_weights(guard, remake, raises):
    before = weights(guard.checkpoint).read_bytes()

    def port():
        with guard.watched("python:mine"):
            overwrite(weights(guard.checkpoint))
            if raises:
                raise ValueError("its own trouble")

    with pytest.raises(
        NotJudged, match=r"python:mine changed the checkpoint .* model\.safetensors was altered"
    ) as caught:
        port()
    assert caught.value.code == "checkpoint-changed"
    with guard.watched("python:next"):
        assert weights(guard.checkpoint).read_bytes() == before
    assert weights(remake()).read_bytes() == before


def test_a_new_file_and_a_deleted_folder_are_changes(guard):
    with pytest.raises(NotJudged, match=r"adapter_config\.json is new"), guard.watched("a"):
        (Path(guard.checkpoint.path) / "adapter_config.json").write_text("{}")
    with pytest.raises(NotJudged, match="is missing"), guard.watched("b"):
        shutil.rmtree(guard.checkpoint.path)
    with guard.watched("c"):
        assert weights(guard.checkpoint).is_file()


def test_another_error_is_that_error_where_nothing_was_written(guard):
    with pytest.raises(ValueError, match="mine"), guard.watched("a"):
        raise ValueError("mine")


def test_weights_of_the_user_cannot_be_restored_and_nothing_more_is_judged_on_them(remake, tmp_path):
    folder = shutil.copytree(remake().path, tmp_path / "mine")
    guard = guarded(Checkpoint(repo_id="mine", path=str(folder)), remake=None, copies=None)
    with guard.watched("good"):
        pass
    with pytest.raises(NotJudged, match="bad changed"), guard.watched("bad"):
        (folder / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    with pytest.raises(NotJudged, match="bad changed"), guard.watched("later"):
        pass
