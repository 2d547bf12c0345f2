"""From a BACKEND to a recipe: which packages, pinned how, and how we know that the result works."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef

BRIDGE_ONLY_FROM = Version("4.0")
BRIDGE_FROM = Version("3.0")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is in an environment."""

    backend: str
    package: str
    version: str
    requirements: tuple[str, ...]
    excluded: tuple[str, ...]
    python: str
    check: str

    @property
    def key(self) -> str:
        """Folder name: readable, and different for different contents."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.package}-{self.version}-{digest}"


@cache
def table() -> dict[str, Any]:
    """The recipes as data."""
    loaded: dict[str, Any] = json.loads(files("parity_audit.envs").joinpath("recipes.json").read_text())
    return loaded


def recipe_for(ref: BackendRef, device: str = "cpu") -> Recipe:
    """The recipe of a backend; an unlisted version takes the recipe of its release line.

    Raises:
        UsageError: the version is not a version.
    """
    if ref.target is not None:
        ref = port_environment(ref) or BackendRef(name="hf")
    data = table()
    entry = data["backends"][ref.name]
    if device == "cuda" and "cuda" in entry:
        entry = {**entry, **entry["cuda"]}
    text = ref.version or entry["default"]
    version = parse_version(text, ref)
    line = next((line for line in entry["releases"] if version in SpecifierSet(line["versions"], prereleases=True)), {})
    requirements = (
        entry.get("torch", data["torch"]), f"{entry['package']}=={text}", *entry["with"], *line.get("with", [])
    )  # fmt: skip
    python = line.get("python", f"{sys.version_info.major}.{sys.version_info.minor}")
    excluded = tuple(data["no_wheels"]) if device == "cpu" else ()
    return Recipe(
        backend=ref.name, package=entry["package"], version=text, requirements=requirements, excluded=excluded,
        python=python, check=entry["check"],
    )  # fmt: skip


def port_environment(ref: BackendRef) -> BackendRef | None:
    """The backend whose environment a port asks for with `env=`, None for the interpreter of its own choice."""
    wanted = ref.settings.get("env")
    return None if wanted is None else parse_backend(str(wanted))


def parse_version(text: str, ref: BackendRef) -> Version:
    """A version, or an error that names the option."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(
            f"`{text}` is not a version", code="backend-version", found=str(ref), hint="for example `hf==4.43.2`"
        ) from None


def backend_key(ref: BackendRef, version: str) -> str:
    """Which implementation runs a release: TransformerLens had HookedTransformer before 4.0, both in 3.x, then the bridge."""
    if ref.name != "transformer_lens":
        return ref.name
    wants_bridge = ref.settings.get("api") == "bridge"
    release = parse_version(version, ref)
    if wants_bridge and release < BRIDGE_FROM:
        raise UsageError(
            f"TransformerLens {version} has no bridge", code="backend-setting", hint="3.0 and later have one"
        )
    return "transformer_bridge" if release >= BRIDGE_ONLY_FROM or wants_bridge else "hooked_transformer"
