"""A matrix file: models x backends x versions x dtypes.

```yaml
models: [gemma-2-2b-it, meta-llama/Llama-3.2-1B]
backends:                       # BACKEND strings, or versions by backend
  transformer_lens: [2.18.0, 4.3.0]
  vllm: []                      # the release that runs here
dtypes: [float32]               # left out: float32
reference: hf                   # left out: hf
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.choices import nearest
from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef
from parity_audit.specs.load import read_yaml
from parity_audit.specs.places import entry_lines

KEYS = ("models", "backends", "dtypes", "reference")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One audit: every backend of a model in one dtype. `lines`: where each backend is asked for, by its string."""

    model: str
    dtype: str
    reference: str
    backends: tuple[BackendRef, ...]
    file: str = ""
    lines: tuple[tuple[str, int], ...] = ()


def read_matrix(path: Path) -> list[Cell]:
    """The audits that a file asks for, one per model and dtype.

    Raises:
        UsageError: no such file, an unknown key, no model or no backend.
        SpecError: broken YAML, with its line.
    """
    if not path.is_file():
        raise UsageError(f"no matrix file `{path}`", code="matrix", where=str(path))
    data = read_yaml(path)
    for key in data:
        if key not in KEYS:
            raise _wrong(path, f"`{key}` is not a key of a matrix", nearest(str(key), KEYS))
    places = entry_lines(data, "backends")
    named = list(_backends(data.get("backends")))
    models = data.get("models")
    if not isinstance(models, list) or not models or not named:
        raise _wrong(path, "a matrix needs a list of `models` and one or more `backends`")
    lines = tuple((str(ref), places.get(entry, 1)) for entry, ref in named)
    backends = tuple(ref for _, ref in named)
    return [
        Cell(
            model=str(model), dtype=str(dtype), reference=str(data.get("reference", "hf")), backends=backends,
            file=str(path), lines=lines,
        )
        for model in models for dtype in data.get("dtypes") or ["float32"]
    ]  # fmt: skip


def _backends(entries: Any) -> Iterator[tuple[str, BackendRef]]:
    """(entry of the file, BACKEND) of each."""
    if isinstance(entries, dict):
        for name, versions in entries.items():
            for text in [f"{name}=={version}" for version in versions or ()] or [str(name)]:
                yield str(name), parse_backend(text)
    for entry in entries if isinstance(entries, list) else ():
        yield str(entry), parse_backend(str(entry))


def _wrong(path: Path, what: str, hint: str = "") -> UsageError:
    return UsageError(what, code="matrix", where=str(path), expected=", ".join(KEYS), hint=hint)
