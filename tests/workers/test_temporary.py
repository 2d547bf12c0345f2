"""Directories for temporary files end with their process, also where it had no time to delete them."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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
    assert [path.name for path in tmp_path.glob("audit-*")] == ["audit-of-somebody-else"]


def test_what_torch_compiled_is_there_for_the_next(tmp_path, monkeypatch):
    """Kernels where the variable says, headers below the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def started(expression):
        own = OwnTemporary()
        said = f"from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir; print({expression})"
        environ = {**os.environ, **own.variables}
        found = Path(subprocess.check_output([sys.executable, "-c", said], text=True, env=environ).strip())
        return own, found

    own, kernels = started("cache_dir()")
    (kernels / "kernel").touch()
    own.drop()
    own, headers = started("default_cache_dir()")

    assert headers.is_relative_to(own.folder)
    assert (headers / "kernel").exists()
    own.drop()
    assert (kernels / "kernel").exists()
