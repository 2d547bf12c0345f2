"""`cache list`, `size` and `prune`: what is there, and that nothing in use is ever deleted."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from parity_audit.cache.aside import set_aside
from parity_audit.cache.locks import hold
from parity_audit.capture.workspace import Workspace
from parity_audit.cli.app import app
from parity_audit.core.errors import UsageError
from parity_audit.envs.build import INFO, use_lock
from parity_audit.offline.stored import prune, stored

BYTES = 40_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """One thing of every kind, an audit that runs, and one that was killed with a finished capture."""
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "cache"
    for folder in ("captures/kept", "synthetic/made", "synthetic/.making-x", "envs/hf-1.0-abc", "envs/hf-2.0-half"):
        (root / folder).mkdir(parents=True)
        (root / folder / "file").write_bytes(b"x" * BYTES)
    (root / "captures/kept/manifest.json").write_text("{}")
    (root / "captures/half").mkdir()
    (root / "envs/hf-1.0-abc/bin").mkdir()
    (root / "envs/hf-1.0-abc/bin/python").write_text("")
    (root / "envs/hf-1.0-abc" / INFO).write_text('{"backend": "hf"}')
    (root / "workers").mkdir()
    (root / "workers/worker-1.pyz").write_text("zip")
    for path in ("specs/a.json", "config-classes/b.json", "config-classes/c.7.part"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("{}")
    (root / "broken").mkdir()
    set_aside(root / "broken", what="capture", why="test")
    return root


@pytest.fixture
def audits(cache, tmp_path):
    alive, killed = Workspace.open(tmp_path / "a", "m"), Workspace.open(tmp_path / "b", "m")
    (killed.captures / "finished").mkdir()
    (killed.captures / "finished" / "manifest.json").write_text("{}")
    killed.alive.release()
    return alive, killed


def names(items):
    return sorted((item.kind, item.name) for item in items)


def left(audits):
    """What an audit that runs, and things in use or worth keeping, leave of the fixture."""
    kept = [
        ("captures", "finished"),
        ("environments", "hf-1.0-abc"),
        ("readings", "a.json"),
        ("readings", "b.json"),
        ("synthetic", "made"),
        ("workers", "worker-1.pyz"),
    ]
    return [*kept, ("working", audits[0].working.name)]


def test_everything_is_listed_with_its_size_and_use(cache, audits):
    found = {(item.kind, item.name): item for item in stored()}

    assert {kind for kind, _ in found} == {
        "environments",
        "synthetic",
        "workers",
        "readings",
        "working",
        "set-aside",
        "leftovers",
    }  # the running audit has claimed the capture
    assert found["working", audits[0].working.name].in_use
    assert BYTES <= found["synthetic", "made"].bytes <= BYTES + 8192
    assert not found["synthetic", "made"].in_use


def test_prune_deletes_what_is_never_read_again_and_keeps_finished_captures(cache, audits):
    prune()

    assert names(stored()) == left(audits)


def test_a_dry_run_deletes_nothing(cache, audits):
    before = names(stored())

    assert ("leftovers", ".making-x") in names(prune(dry_run=True))
    assert names(stored()) == before


def test_nothing_in_use_is_deleted_whatever_is_asked(cache, audits):
    used = hold(use_lock(cache / "envs/hf-1.0-abc"), shared=True)
    making = hold(cache / "synthetic/made.lock")
    prune(everything=True)

    assert names(stored()) == [(kind, name) for kind, name in left(audits) if kind != "readings"]
    for lock in (used, making, audits[0].alive):
        lock.release()
    prune(everything=True)
    prune(everything=True)  # the captures of the second killed audit, too
    assert stored() == []


def test_another_kind_is_refused(cache):
    with pytest.raises(UsageError, match="not a kind"):
        prune(["envs"])


def test_the_commands(cache, audits):
    assert "in use" in CliRunner().invoke(app, ["cache", "list"]).output
    assert "total" in CliRunner().invoke(app, ["cache", "size"]).output
    gone = CliRunner().invoke(app, ["cache", "prune", "--kind", "synthetic"])
    assert "deleted synthetic made" in gone.output
    assert "GiB was freed" in gone.output
    assert CliRunner().invoke(app, ["cache", "prune", "--kind", "all"]).exit_code == 2
