"""A capture directory is replaced whole or not at all, and nobody's other files with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity_audit.backends.sink import write_site
from parity_audit.capture.place import place, require_replaceable
from parity_audit.capture.store import open_capture, write_manifest
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import RunRequest

ROOT = Path(__file__).parents[2]
PROBE = Probe(name="short", purpose="test", token_ids=((2, 9, 11),), mask=((1, 1, 1),))


def taken(folder, value):
    entry = write_site(
        RunRequest(probe=PROBE, taps=(), out=str(folder)), "logits", torch.full((1, 3, 5), value), torch.float32
    )
    checkpoint = Checkpoint(repo_id="x", path="/x")
    write_manifest(
        folder, Manifest(backend="m", dtype="float32", device="cpu", checkpoint=checkpoint, entries=(entry,))
    )
    return open_capture(folder)


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_old_judge_does_not_stay_beside_a_new_capture(tmp_path):
    out, old, new = tmp_path / "out", taken(tmp_path / "one", 1.0), taken(tmp_path / "two", 2.0)
    place({"": old, "judge": old}, out)
    place({"": new}, out)

    assert files(out) == ["manifest.json", "manifest.sha256", "short/logits.safetensors"]
    assert open_capture(out).tensor("short", "logits").unique().tolist() == [2.0]


def test_logs_are_kept_and_nothing_is_left_beside(tmp_path):
    out = tmp_path / "box" / "out"
    (out / "logs").mkdir(parents=True)
    (out / "logs" / "hf.log").write_text("loaded")
    place({"": taken(tmp_path / "one", 1.0)}, out)

    assert (out / "logs" / "hf.log").read_text() == "loaded"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def busy(rename):
    """`rename`, but for the new capture the disk says no."""

    def renamed(source, target):
        if source.name == "new":
            raise OSError(16, "busy")
        rename(source, target)

    return renamed


@pytest.mark.parametrize("broken", ["copy", "swap"])
def test_a_failure_leaves_the_old_capture_whole(tmp_path, monkeypatch, broken):
    out = tmp_path / "box" / "out"
    place({"": taken(tmp_path / "one", 1.0), "judge": taken(tmp_path / "judge", 3.0)}, out)
    before, new = files(out), taken(tmp_path / "two", 2.0)
    if broken == "copy":
        new.file("short", "logits").unlink()
        new.file("short", "logits").symlink_to(tmp_path / "nowhere")
    else:
        monkeypatch.setattr(os, "rename", busy(os.rename))

    with pytest.raises(NotJudged, match="cannot write the capture"):
        place({"": new}, out)
    assert files(out) == before
    assert open_capture(out).tensor("short", "logits").unique().tolist() == [1.0]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "weights/model.safetensors", "short/notes.txt", "weights/adapter.safetensors"]
)
def test_a_directory_with_other_files_is_refused(tmp_path, name):
    place({"": taken(tmp_path / "one", 1.0)}, tmp_path / "out")
    path = tmp_path / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")

    with pytest.raises(UsageError, match="would be lost"):
        require_replaceable(tmp_path / "out")


def test_a_broken_capture_may_be_replaced(tmp_path):
    place({"": taken(tmp_path / "one", 1.0)}, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "short" / "blocks.0.q.part").write_bytes(b"half")

    require_replaceable(tmp_path / "out")
    require_replaceable(tmp_path / "new")
    shutil.rmtree(tmp_path / "out")


KILLED = """
import os, pathlib, shutil, sys
from parity_audit.capture import place as module
from parity_audit.capture.store import open_capture
def killed(*_, **__): os.kill(os.getpid(), 9)
if sys.argv[1] == "copying":
    module.shutil.copytree = killed
else:
    rename = os.rename
    module.os.rename = lambda a, b: killed() if a.name == "new" else rename(a, b)
module.place({"": open_capture(pathlib.Path(sys.argv[2]))}, pathlib.Path(sys.argv[3]))
"""


@pytest.mark.parametrize("when", ["copying", "swapping"])
def test_what_a_killed_one_left_beside_is_reclaimed(tmp_path, when):
    """Killed between the two renames, the earlier capture stands beside its place; it is put back, then replaced."""
    out, new = tmp_path / "box" / "out", taken(tmp_path / "two", 2.0)
    place({"": taken(tmp_path / "one", 1.0)}, out)
    (out.parent / ".out-mine").mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, when, str(new.folder), str(out)], cwd=ROOT)
    assert done.returncode == -9
    assert out.exists() == (when == "copying")
    assert len(list(out.parent.iterdir())) == (3 if when == "copying" else 2)

    place({"": new}, out)

    assert sorted(path.name for path in out.parent.iterdir()) == [".out-mine", "out"]
    assert open_capture(out).tensor("short", "logits").unique().tolist() == [2.0]
