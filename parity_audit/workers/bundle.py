"""The worker program: `core/` and `backends/` as one zipapp, so that nothing else of the parent travels with it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

PARTS = ("core", "backends")
MAIN = "from parity_audit.backends.serve import main\nmain()\n"


def bundle(folder: Path) -> Path:
    """Write the zipapp into `folder`, named by its contents; an existing one is reused."""
    files = _sources()
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(name.encode() + b"\0" + data)
    target = folder / f"worker-{digest.hexdigest()[:16]}.pyz"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            archive.writestr(name, data)
        archive.writestr("__main__.py", MAIN)
    os.replace(part, target)
    return target


def _sources() -> list[tuple[str, bytes]]:
    root = Path(__file__).parents[1]
    paths = [root / "__init__.py", *(path for part in PARTS for path in sorted((root / part).rglob("*.py")))]
    return [(path.relative_to(root.parent).as_posix(), path.read_bytes()) for path in paths]
