"""A miniature is what its label says: whatever happened to its files is found by their hashes, and made good."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parity_audit.cache.contents import contents
from parity_audit.cache.locks import hold_if_free
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "synthetic"


def make(root):
    return miniature.make(resolve_model("gpt2"), root=root)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGE = {
    "flipped": lambda folder: flip(folder / "model.safetensors"),
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "deleted": lambda folder: (folder / "tokenizer.json").unlink(),
    "added": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "config": lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
    "linked": lambda folder: (shutil.move(folder / "config.json", folder.parents[3]),
                              (folder / "config.json").symlink_to(folder.parents[3] / "config.json")),
    "another snapshot": lambda folder: (folder.parents[1] / "refs" / "main").write_text("other"),
    "no seal": lambda folder: next(folder.parents[4].glob("*.sha256.json")).unlink(),
    "half": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_said_and_made_good(root, damage, caplog):
    made = make(root)
    good = contents(Path(made.path))
    DAMAGE[damage](Path(made.path))

    with caplog.at_level(logging.WARNING, "parity_audit"):
        again = make(root)

    assert again == made
    assert contents(Path(again.path)) == good
    assert "the miniature gpt2-mini-0" in caplog.text
    assert len(list((root.parent / "set-aside").iterdir())) == 1


def test_an_intact_one_is_not_made_again(root, caplog):
    made = Path(make(root).path) / "model.safetensors"
    before = made.stat().st_ino
    make(root)

    assert made.stat().st_ino == before
    assert caplog.text == ""


def test_what_a_killed_process_left_half_made_is_replaced(root):
    home = Path(make(root).hf_home or "")
    shutil.rmtree(home)
    half = root / f".making-{home.name}" / "hub"
    half.mkdir(parents=True)
    (half / "junk").write_text("half")
    made = make(root)

    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [home.name]
    assert not (Path(made.hf_home or "") / "hub" / "junk").exists()


def test_its_lock_is_free_afterwards(root):
    make(root)
    lock = hold_if_free(next(root.glob("*.lock")))

    assert lock is not None
    lock.release()


FULL = """
import pathlib, resource, signal, sys
from parity_audit.core.errors import NotJudged
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = resolve_model("gpt2")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    miniature.make(model, root=pathlib.Path(sys.argv[1]))
except NotJudged as error:
    print(error.code, error.hint)
"""


def test_a_disk_that_takes_no_more_is_a_clear_error_and_leaves_nothing_half_made(root):
    done = subprocess.run([sys.executable, "-c", FULL, str(root)], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.startswith("disk make room"), done.stderr
    assert [path.suffix for path in root.iterdir()] == [".lock"]
