"""The shipped specs as they were read last, so that a command does not parse 24 YAML files before it starts.

Parsing with positions takes over a second. What was read is kept as JSON in the cache under the hash of every file and of the
code that reads them; it is validated when it is read back, and anything unexpected there means that the YAML is read again.
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
"""The modules here that decide what a file means."""


def remembered(files: Sequence[Path], read: Callable[[], tuple[Spec, ...]]) -> tuple[Spec, ...]:
    """What `read` gives for these files, from the cache where they and the code are those of an earlier run."""
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
