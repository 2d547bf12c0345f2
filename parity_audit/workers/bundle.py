"""Pack the worker program, four folders of this package, as one zipapp, so that a worker imports nothing else from the parent."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from parity_audit.cache.aside import set_aside
from parity_audit.core.errors import refusals_of_the_disk
from parity_audit.core.whole_file import write_whole

PARTS = ("core", "formulas", "batch_invariant", "backends")
MAIN = "from parity_audit.backends.serve import main\nmain()\n"


def bundle(folder: Path) -> Path:
    """Return the zipapp in `folder`, named by a hash of its content. An existing file is used if it has exactly the same bytes.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    data = _zipped(_sources())
    target = folder / f"worker-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    with refusals_of_the_disk("write the worker program", target, "set PARITY_AUDIT_CACHE"):
        if target.is_file() and target.read_bytes() == data:
            return target
        if target.exists():
            set_aside(target, what="worker", why="its bytes are not those of this program", then="written again")
        write_whole(target, data)
    return target


def _zipped(files: list[tuple[str, bytes]]) -> bytes:
    """Return a zip file of these files. It has the same bytes on every machine, without compression and modification times."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [*files, ("__main__.py", MAIN.encode())]:
            archive.writestr(zipfile.ZipInfo(name), data)
    return content.getvalue()


def _sources() -> list[tuple[str, bytes]]:
    root = Path(__file__).parents[1]
    paths = [root / "__init__.py", *(path for part in PARTS for path in sorted((root / part).rglob("*.py")))]
    return [(path.relative_to(root.parent).as_posix(), path.read_bytes()) for path in paths]
