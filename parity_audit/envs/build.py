"""Build environments so that an unfinished one is never used: each is named by a hash, built under a lock and checked.

An environment counts as finished only when its info file exists, which is written last.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parity_audit.cache.aside import set_aside
from parity_audit.cache.locks import hold_if_free, locked
from parity_audit.cache.root import cache_root
from parity_audit.core.backend_ref import LIVE, PORT
from parity_audit.core.errors import EnvFailed, UsageError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef
from parity_audit.core.version import __version__
from parity_audit.envs.damage import damage, in_words
from parity_audit.envs.recipes import SERVED, SPEC, Recipe, backend_key, port_environment, recipe_for
from parity_audit.envs.resolve import Resolution, forget, known_resolution, resolve
from parity_audit.envs.uv import run, run_uv

INFO = "parity_audit_env.json"
OFFLINE = {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
MAIN_PACKAGES = {
    "hf": "transformers", "transformer_lens": "transformer-lens", "nnsight": "nnsight", "vllm": "vllm", "sglang": "sglang",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter that can run one backend. `same` is true if it is the interpreter that runs parity-audit itself."""

    python: str
    key: str
    same: bool
    backend_key: str
    version: str

    @property
    def env_vars(self) -> dict[str, str]:
        """The environment variables that every worker gets."""
        return dict(OFFLINE)


def python_for(
    ref: BackendRef, *, device: str = "cpu", allow_install: bool = True, progress: Progress = SILENT
) -> Environment:
    """Return the running interpreter if it has the requested backend and release, else a cached or new environment.

    Raises:
        EnvFailed: there is no such environment and none may be made, or the recipe cannot be resolved, or the new
            environment does not start.
    """
    if ref.name == LIVE:
        return Environment(python=sys.executable, key=f"{LIVE}-{ref.target}", same=True, backend_key=PORT, version="")
    if ref.target is not None:
        return _port_environment(ref, device=device, allow_install=allow_install, progress=progress)
    if ref.name == SPEC:
        return _spec_environment(ref)
    if ref.name == SERVED:
        return Environment(python=sys.executable, key=SERVED, same=True, backend_key=SERVED, version="")
    own = installed_here(ref.name)
    if own is not None and ref.version in (None, own):
        return Environment(python=sys.executable, key="same", same=True, backend_key=backend_key(ref, own), version=own)
    recipe = recipe_for(ref, device)
    folder = environment_of(recipe)
    why = "" if folder is None else _quick_damage(folder)
    if folder is None or why:
        if not allow_install:
            what = f"the environment for `{ref}` is damaged ({why})" if why else f"no environment for `{ref}`"
            raise EnvFailed(
                f"{what}, and --no-install forbids making one", code="env-missing",
                hint=f"run `parity-audit envs create '{ref.name}=={recipe.version}'`",
            )  # fmt: skip
        folder = create(recipe, progress, damaged=None if folder is None else Damaged.of(folder, why))
    return Environment(
        python=str(folder / "bin" / "python"), key=folder.name, same=False,
        backend_key=backend_key(ref, recipe.version), version=recipe.version,
    )  # fmt: skip


def _spec_environment(ref: BackendRef) -> Environment:
    """Return the running interpreter, because this program's own formulas run a spec. Raises UsageError for another version."""
    recipe_for(ref)
    return Environment(
        python=sys.executable, key=f"{SPEC}-{__version__}", same=True, backend_key=SPEC, version=__version__
    )


def _port_environment(ref: BackendRef, *, device: str, allow_install: bool, progress: Progress) -> Environment:
    """Return the interpreter for a port: that of `env=BACKEND`, that of `python=PATH`, or the running one.

    Its key includes a hash of the function's name and of the Python files in the port's folder, so that another port,
    or an edited one, is captured again.
    """
    file, _, function = str(ref.target).rpartition(":")
    digest = _digest_of(Path(file), function)
    home = port_environment(ref)
    if home is not None:
        base = python_for(home, device=device, allow_install=allow_install, progress=progress)
    else:
        python = str(ref.settings.get("python", sys.executable))
        base = Environment(python=python, key=python, same=python == sys.executable, backend_key=ref.name, version="")
    return dataclasses.replace(base, key=f"{base.key}-{digest}", backend_key=ref.name, version="")


def _digest_of(file: Path, function: str) -> str:
    """Return a hash of a function's name, its file, and every Python file in the same folder, which the file can import."""
    digest = hashlib.sha256(f"{file.name}:{function}".encode())
    for module in sorted({file, *file.parent.glob("*.py")}):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:12]


def installed_here(backend: str) -> str | None:
    """Return the release of a backend in the running interpreter; None if it is not installed."""
    try:
        return importlib.metadata.version(MAIN_PACKAGES[backend])
    except importlib.metadata.PackageNotFoundError:
        return None


def envs_root() -> Path:
    """Return the directory of all environments."""
    return cache_root() / "envs"


def is_ready(folder: Path) -> bool:
    """Return whether an environment is finished: it has an interpreter and its info file, which is written last."""
    return bool(_info(folder)) and (folder / "bin" / "python").exists()


def _info(folder: Path) -> dict[str, Any]:
    """Return the info file of an environment; empty if the environment is unfinished or the file cannot be read."""
    try:
        found = json.loads((folder / INFO).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "backend" in found else {}


@dataclass(frozen=True)
class Damaged:
    """An environment and what is wrong with it.

    `inode` is that of the folder when it was examined, so that an environment that was made again since can be
    recognised.
    """

    folder: Path
    why: str
    inode: int

    @staticmethod
    def of(folder: Path, why: str) -> Damaged:
        """Return the damage of the environment that is at `folder` now."""
        return Damaged(folder, why, folder.stat().st_ino)

    def set_aside(self) -> None:
        """Move the damaged environment away, unless another process has made it again in the meantime."""
        if self.folder.is_dir() and self.folder.stat().st_ino == self.inode:
            set_aside(self.folder, what="environment", why=self.why)


def environment_of(recipe: Recipe) -> Path | None:
    """Return the finished environment of a recipe with the exact versions that the recipe was resolved to; None if there is none."""
    resolution = known_resolution(recipe)
    folder = envs_root() / recipe.key_with(resolution.pins) if resolution else None
    return folder if folder is not None and is_ready(folder) else None


@cache
def _quick_damage(folder: Path) -> str:
    """Return the first file that is missing or has another size, in words; each process checks an environment only once."""
    return damage_of(folder, whole=False)


def damage_of(folder: Path, *, whole: bool) -> str:
    """Return the first file that differs from a fresh installation, in words; empty if none does.

    Args:
        whole: compare hashes, and not only sizes.
    """
    return in_words(damage(folder, whole=whole, accepted=_info(folder).get("unlike_record", ())))


def create(recipe: Recipe, progress: Progress = SILENT, *, damaged: Damaged | None = None) -> Path:
    """Build the environment of a recipe, check that it starts, and return its folder.

    Args:
        damaged: a damaged environment of this recipe, which is moved away first.

    Raises:
        EnvFailed: uv cannot resolve or install it, or the health check fails; no unfinished environment is left.
    """
    root = envs_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{recipe.key}.lock"):
            if damaged is not None:
                damaged.set_aside()
            _quick_damage.cache_clear()
            progress.update("environment", f"{recipe.package} {recipe.version}: resolving")
            resolution = resolve(recipe)
            return _create_locked(recipe, resolution, root / recipe.key_with(resolution.pins), progress)
    except OSError as error:
        raise EnvFailed(
            f"cannot write environments: {error}", where=str(root), hint="set PARITY_AUDIT_CACHE"
        ) from error


def _create_locked(recipe: Recipe, resolution: Resolution, folder: Path, progress: Progress) -> Path:
    if is_ready(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        unlike = _install(recipe, resolution, folder, progress)
        content = {
            "backend": recipe.backend, "date": resolution.date, "packages": resolution.versions, "unlike_record": unlike
        }  # fmt: skip
        (folder / INFO).write_text(json.dumps(content, indent=1))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        forget(recipe)
        raise
    return folder


def _install(recipe: Recipe, resolution: Resolution, folder: Path, progress: Progress) -> list[str]:
    """Make the environment, run its health check, and return the files that differ from the RECORD of their package.

    uv links files from its own cache, so a file that was modified in one environment is modified in the cache too. If
    hashes differ, everything is therefore installed again without that cache. A file that still differs is a mistake in
    the package itself.
    """
    name = f"{recipe.package} {recipe.version}"
    progress.update("environment", f"{name}: creating")
    run_uv("venv", "--quiet", "--python", recipe.python, str(folder), what=f"{name} needs Python {recipe.python}")
    python, wrong = str(folder / "bin" / "python"), {}
    for more in ((), ("--no-cache", "--reinstall")):
        progress.update("environment", f"{name}: installing")
        run_uv(
            "pip", "install", "--quiet", "--no-deps", "--python", python, *more, *resolution.options, "--requirement", "-",
            what=f"{name} cannot be installed", text="\n".join(resolution.pins),
        )  # fmt: skip
        progress.update("environment", f"{name}: checking")
        wrong = damage(folder, whole=True)
        if not wrong:
            break
    _put_files(recipe, folder)
    run([python, "-I", "-c", recipe.check], f"{name} installs but does not start")
    return sorted(wrong)


def _put_files(recipe: Recipe, folder: Path) -> None:
    """Write the files that the recipe adds to the installed packages of this environment."""
    for packages in folder.glob("lib/python*/site-packages") if recipe.files else ():
        for name, text in recipe.files:
            path = packages / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def list_envs() -> list[tuple[str, str, int]]:
    """Return (key, backend, bytes on disk) of every finished environment."""
    found = []
    for folder in sorted(envs_root().glob("*/")):
        if is_ready(folder):
            size = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
            found.append((folder.name, str(_info(folder)["backend"]), size))
    return found


def remove_env(key: str) -> None:
    """Delete one environment, finished or not, by the name of its folder.

    Raises:
        UsageError: there is no environment of that name (a path is not a name), or it is in use.
    """
    root = envs_root()
    known = {folder.name: folder for folder in root.glob("*/") if not folder.is_symlink()}
    if key not in known:
        near = difflib.get_close_matches(key, known, 1, 0.4)
        raise UsageError(
            f"no environment `{key}`", code="unknown-env", expected=", ".join(sorted(known)) or "none is there",
            hint=f"did you mean `{near[0]}`?" if near else "`parity-audit envs list` shows their names",
        )  # fmt: skip
    lock = hold_if_free(use_lock(known[key]))
    if lock is None:
        raise UsageError(f"environment `{key}` is in use", code="in-use", hint="wait for the audit that runs in it")
    shutil.rmtree(known[key])
    use_lock(known[key]).unlink(missing_ok=True)
    lock.release()


def use_lock(folder: Path) -> Path:
    """Return the file on which a shared lock is held while something runs in an environment."""
    return folder.parent / f"{folder.name}.use"


def default_candidates(device: str, *, install: bool) -> list[BackendRef]:
    """Return the candidate backends that can run here: those that are installed or cached, or all if `install` is true."""
    refs = [BackendRef(name="transformer_lens"), BackendRef(name="vllm")]
    return [ref for ref in refs if install or _exists(ref, device)]


def _exists(ref: BackendRef, device: str) -> bool:
    return installed_here(ref.name) is not None or environment_of(recipe_for(ref, device)) is not None
