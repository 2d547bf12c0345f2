"""The recipe of a backend's environment: its packages, their pins, and the check that the environment works."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef
from parity_audit.core.version import __version__

BRIDGE_ONLY_FROM = Version("4.0")
BRIDGE_FROM = Version("3.0")
LOCKS = "locks"
FILES = "files"
ADDED = ("alone", "files")
"""Fields that are empty in most recipes. An empty one is left out of the hash, so it does not change the environment's name."""
SPEC = "spec"
"""The backend that runs a spec; it has no environment of its own."""
SERVED = "served"
"""The backend that sends requests to a server that the user runs; it needs no engine here."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the content of an environment.

    `alone` are pins of packages that are installed without their dependencies; `files` (name, text) are written beside
    the packages.
    """

    backend: str
    package: str
    version: str
    torch: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...]
    locked: tuple[str, ...]
    python: str
    device: str
    check: str
    alone: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """A readable name with a hash of the recipe's content."""
        return self.key_with(())

    def key_with(self, pins: Sequence[str]) -> str:
        """Return the same kind of name for a recipe together with the versions that it was resolved to."""
        own = {key: value for key, value in asdict(self).items() if value or key not in ADDED}
        content = json.dumps([own, list(pins)], sort_keys=True)
        return f"{self.package}-{self.version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@cache
def table() -> dict[str, Any]:
    """Return the content of recipes.json."""
    loaded: dict[str, Any] = json.loads(files("parity_audit.envs").joinpath("recipes.json").read_text())
    return loaded


def recipe_for(ref: BackendRef, device: str = "cpu") -> Recipe:
    """Return the recipe of a backend; a version that is not listed gets the recipe of its release line.

    Raises:
        UsageError: the version cannot be parsed, or a spec asks for another version than that of this parity-audit.
    """
    if ref.name == SPEC and ref.version not in (None, __version__):
        raise UsageError(f"`{ref}`: this parity-audit is {__version__}", code="backend-version", hint=f"write `{SPEC}`")
    if ref.target is not None or ref.name == SPEC:
        ref = port_environment(ref) or BackendRef(name="hf")
    data = table()
    entry = data["backends"][ref.name]
    if device == "cuda" and "cuda" in entry:
        entry = {**entry, **entry["cuda"]}
    text = ref.version or entry["default"]
    version = parse_version(text, ref)
    line: dict[str, Any] = next(
        (line for line in entry["releases"] if version in SpecifierSet(line["versions"], prereleases=True)), {}
    )
    pin = f"{entry['package']}=={text}"
    added = {key: line.get(key, entry.get(key, ())) for key in ADDED}
    alone = tuple(pin if name == entry["package"] else name for name in added["alone"])
    return Recipe(
        backend=ref.name, package=entry["package"], version=text, device=device, check=entry["check"],
        torch=entry.get("torch", data["torch"]),
        requirements=(*(() if pin in alone else (pin,)), *entry["with"], *line.get("with", []), *_for_settings(entry, ref)),
        overrides=tuple(data["overrides"]) if device == "cpu" else (),
        locked=_lock(f"{entry['package']}-{text}.txt"), python=data["python"],
        alone=alone, files=_files(added["files"]),
    )  # fmt: skip


def _for_settings(entry: dict[str, Any], ref: BackendRef) -> Iterator[str]:
    """Yield the packages that the given settings need in addition to the engine.

    They are part of the recipe, so the environment differs from one without them.
    """
    for setting, packages in entry.get("settings", {}).items():
        if ref.settings.get(setting) is not None:
            yield from packages


def _lock(name: str) -> tuple[str, ...]:
    """Return the shipped pins `name==version` of a tested release's dependencies; empty for a release without a lock file."""
    path = files("parity_audit.envs") / LOCKS / name
    return tuple(path.read_text().split()) if path.is_file() else ()


def _files(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the path and text of every file that is written into an environment beside its packages."""
    root = files("parity_audit.envs").joinpath(FILES)
    return tuple(
        (path, root.joinpath(name, *path.split("/")).read_text()) for name in names for path in table()["files"][name]
    )


def port_environment(ref: BackendRef) -> BackendRef | None:
    """Return the backend whose environment a port requests with `env=`; None if it does not."""
    wanted = ref.settings.get("env")
    return None if wanted is None else parse_backend(str(wanted))


def parse_version(text: str, ref: BackendRef) -> Version:
    """Return the parsed version; raise UsageError, which names the backend, if the text is not a version."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(
            f"`{text}` is not a version", code="backend-version", found=str(ref), hint="for example `hf==4.43.2`"
        ) from None


def backend_key(ref: BackendRef, version: str) -> str:
    """Return the implementation that runs a release of a backend.

    It is the backend's name, except for TransformerLens: HookedTransformer before 4.0, the bridge from 4.0 on, and in
    3.x either of them (`api=bridge` for the bridge).
    """
    if ref.name != "transformer_lens":
        return ref.name
    wants_bridge = ref.settings.get("api") == "bridge"
    release = parse_version(version, ref)
    if wants_bridge and release < BRIDGE_FROM:
        raise UsageError(
            f"TransformerLens {version} has no bridge", code="backend-setting", hint="3.0 and later have one"
        )
    return "transformer_bridge" if release >= BRIDGE_ONLY_FROM or wants_bridge else "hooked_transformer"
