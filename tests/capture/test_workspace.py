"""Audits side by side do not touch each other's captures, and what one leaves behind the next one finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parity_audit.capture.plan import opened
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import UsageError


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
