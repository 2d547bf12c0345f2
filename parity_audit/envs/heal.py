"""Environments while they are used: kept from being deleted, and made again where they turn out to be damaged."""

from __future__ import annotations

import sys
from pathlib import Path

from parity_audit.cache.locks import Lock, hold
from parity_audit.core.errors import ENGINE_SETTING, CannotRun, EnvFailed, NotJudged
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef
from parity_audit.envs.build import Damaged, Environment, create, damage_of, envs_root, use_lock
from parity_audit.envs.recipes import recipe_for
from parity_audit.envs.uv import run

OTHER_CAUSES = frozenset({
    ENGINE_SETTING, CannotRun.default_code, "bad-weights", "missing-tensors", "name-not-in-release", "out-of-memory", "disk-full",
})  # fmt: skip
"""Codes of failures that say what is wrong, and it is not the environment: comparing its files and trying its imports takes half a
minute."""


def folder_of(environment: Environment) -> Path | None:
    """The folder of an environment that was made here; None for interpreters of the user's own."""
    folder = Path(environment.python).parents[1]
    return folder if folder.parent == envs_root() and environment.python != sys.executable else None


def use(environment: Environment) -> Lock | None:
    """Keep an environment from being removed until the lock is released; None for one that is not ours."""
    folder = folder_of(environment)
    return None if folder is None else hold(use_lock(folder), shared=True)


def healed(
    failure: NotJudged, ref: BackendRef, environment: Environment, *,
    device: str, install: bool = True, progress: Progress = SILENT,
) -> bool:  # fmt: skip
    """Whether the environment, in which something just failed, was damaged and has been made again.

    Every file is compared with the hash that its package was installed with, then the health check is run.

    Raises:
        EnvFailed: it is damaged and may not or cannot be made again.
    """
    folder = folder_of(environment)
    if folder is None or failure.code in OTHER_CAUSES:
        return False
    recipe = recipe_for(ref, device)
    progress.update("environment", f"{recipe.package} {recipe.version}: comparing its files with their hashes")
    why = damage_of(folder, whole=True) or _does_not_start(environment.python, recipe.check)
    if not why:
        return False
    if not install:
        raise EnvFailed(f"the environment {folder.name} is damaged: {why}", where=str(folder), hint="drop --no-install")
    create(recipe, progress, damaged=Damaged.of(folder, why))
    return True


def _does_not_start(python: str, check: str) -> str:
    try:
        run([python, "-I", "-c", check], "its health check fails")
    except EnvFailed as error:
        return error.message
    except OSError as error:
        return f"its interpreter cannot be started: {error.strerror}"
    return ""
