"""Audits side by side do not touch each other's captures, and what one leaves behind the next one finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity_audit.capture.plan import opened
from parity_audit.capture.workspace import Workspace, reclaim
from parity_audit.core.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def taken(workspace: Workspace, name: str = "abc"):
    folder = workspace.captures / name
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return SimpleNamespace(folder=folder)


def test_an_audit_that_ends_leaves_another_ones_captures_alone(root):
    first, second = Workspace.open(root / "a", "m"), Workspace.open(root / "b", "m")
    mine, theirs = taken(first), taken(second)

    first.drop_working()
    first.drop([mine])

    assert (theirs.folder / "manifest.json").is_file()


def test_captures_of_an_audit_that_failed_are_found_by_the_next(root):
    failed = Workspace.open(root / "a", "m")
    taken(failed)
    failed.drop_working()

    again = Workspace.open(root / "b", "m")
    beside = Workspace.open(root / "c", "m")

    assert [folder.name for folder in again.captures.iterdir()] == ["abc"]
    assert list(beside.captures.iterdir()) == []


def test_captures_of_an_audit_that_succeeded_are_gone(root):
    done = Workspace.open(root / "a", "m")
    capture = taken(done)
    done.drop_working()
    done.drop([capture])

    assert list(Workspace.open(root / "b", "m").captures.iterdir()) == []
    assert not done.working.exists()


def test_a_malformed_question_leaves_nothing_behind(root):
    failed = Workspace.open(root / "a", "m")
    taken(failed)
    failed.drop_working()

    with pytest.raises(UsageError):
        opened(
            root / "new",
            "no-such-model",
            synthetic="mini",
            seed=0,
            weights=None,
            probes=None,
            dtype="float32",
            device="cpu",
        )

    assert not (root / "new").exists()
    assert [folder.name for folder in Workspace.open(root / "b", "m").captures.iterdir()] == ["abc"]


KILLED = """
import os, pathlib, sys
from parity_audit.capture.workspace import Workspace, reclaim
space = Workspace.open(pathlib.Path(sys.argv[1]), "m")
for name, files in (("whole", ["manifest.json"]), ("half", ["logits.safetensors"])):
    (space.captures / name).mkdir()
    for file in files:
        (space.captures / name / file).write_text("{}")
space.scratch("patched").mkdir()
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_parent_left_is_reclaimed_and_its_finished_captures_reused(root):
    alive = Workspace.open(root / "a", "m")
    mine = taken(alive, "mine")
    done = subprocess.run([sys.executable, "-c", KILLED, str(root / "b")], cwd=ROOT)
    assert done.returncode == -9
    assert len(list(alive.working.parent.iterdir())) == 2

    after = Workspace.open(root / "c", "m")

    assert sorted(folder.name for folder in after.captures.iterdir()) == ["whole"]
    assert sorted(alive.working.parent.iterdir()) == sorted([alive.working, after.working])
    assert (mine.folder / "manifest.json").is_file()


def test_an_audit_that_is_alive_is_never_reclaimed(root):
    first = Workspace.open(root / "a", "m")

    assert reclaim(root / "cache") == []
    first.alive.release()
    assert reclaim(root / "cache") == [first.working]
