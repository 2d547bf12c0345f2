"""Directories for temporary files end with their process, also where it had no time to delete them."""

import signal
import subprocess
import sys
import tempfile

from parity_audit.workers.temporary import OwnTemporary

KILLED = """
import os, signal, sys, tempfile
from parity_audit.workers.temporary import OwnTemporary
tempfile.tempdir = sys.argv[1]
(OwnTemporary().folder / "socket").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_and_what_is_in_use_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "audit-of-somebody-else").mkdir()
    mine = OwnTemporary()

    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("audit-*/socket")
    another = OwnTemporary()

    assert not left.parent.exists()
    assert mine.folder.exists()
    assert another.folder.exists()
    mine.drop()
    another.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["audit-of-somebody-else"]
