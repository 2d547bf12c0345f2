"""A cache of the parsed shipped specs, so that a command does not have to parse every YAML file before it starts.

Parsing with line numbers takes over a second. The parsed specs are cached as JSON; the key is a hash of every spec file
and of the code that reads them. The JSON is validated when it is read, and the YAML files are read again if it is
invalid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from parity_audit.cache.root import cache_root
from parity_audit.cache.texts import keep_text
from parity_audit.specs.schema import Spec, SpecFile

FOLDER = "specs"
READERS = ("load.py", "likeness.py", "schema.py", "remembered.py")
"""The modules of this package that decide how a spec file is read; a change in them makes the cache invalid."""


def remembered(files: Sequence[Path], read: Callable[[], tuple[Spec, ...]]) -> tuple[Spec, ...]:
    """Return the specs that `read` gives for these files; from the cache if neither the files nor the reading code changed."""
    kept = cache_root() / FOLDER / f"{_key(files)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return tuple(_spec(entry, files) for entry in json.loads(kept.read_text()))
    specs = read()
    text = json.dumps([{"name": spec.name, "content": _dumped(spec)} for spec in specs])
    if tuple(_spec(entry, files) for entry in json.loads(text)) == specs:
        keep_text(kept, text)
    return specs


def _key(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (*files, *(Path(__file__).with_name(name) for name in READERS)):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:24]


def _dumped(spec: Spec) -> dict[str, object]:
    return spec.content.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _spec(entry: dict[str, object], files: Sequence[Path]) -> Spec:
    file = next(path for path in files if path.stem == entry["name"])
    return Spec(name=str(entry["name"]), file=str(file), content=SpecFile.model_validate(entry["content"]))
