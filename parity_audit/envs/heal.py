"""Protect environments from deletion while they are used, and rebuild an environment that turns out to be damaged."""

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
"""Codes of failures whose cause is known not to be the environment. For these its files are not compared and its
imports not tried, which would take half a minute."""


def folder_of(environment: Environment) -> Path | None:
    """Return the folder of an environment that parity-audit made; None for any other interpreter."""
    folder = Path(environment.python).parents[1]
    return folder if folder.parent == envs_root() and environment.python != sys.executable else None


def use(environment: Environment) -> Lock | None:
    """Return a lock that protects an environment from removal until it is released; None if parity-audit did not make it."""
    folder = folder_of(environment)
    return None if folder is None else hold(use_lock(folder), shared=True)


def rebuild_if_damaged(
    failure: NotJudged, ref: BackendRef, environment: Environment, *,
    device: str, install: bool = True, progress: Progress = SILENT,
) -> bool:  # fmt: skip
    """After a failure in an environment, rebuild it if it is damaged; return whether that was the case.

    Every file is compared with the hash in the RECORD of its package, then the health check is run.

    Raises:
        EnvFailed: the environment is damaged, and it must not (`install` is false) or cannot be made again.
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
