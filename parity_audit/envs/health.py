"""Find out what this machine can run, without starting an engine."""

from __future__ import annotations

import os
import shutil
import subprocess

from parity_audit.cache.root import cache_root
from parity_audit.core.types import BackendRef
from parity_audit.envs.build import environment_of, installed_here
from parity_audit.envs.recipes import recipe_for, table


def health() -> list[tuple[str, bool, str]]:
    """Return (name, ok, explanation) for every backend and for uv, the cache, CUDA and memory."""
    return [*(_backend(name) for name in table()["backends"]), _uv(), _cache(), _cuda(), _memory()]


def _backend(name: str) -> tuple[str, bool, str]:
    """Return the row of one backend.

    The explanation says where the backend is installed and, if it runs differently here than on other devices, how.
    """
    path = table()["backends"][name].get("path", "")
    return name, True, "; ".join(part for part in (_where(name), path) if part)


def _where(name: str) -> str:
    own = installed_here(name)
    if own:
        return f"{own}, in this interpreter"
    recipe = recipe_for(BackendRef(name=name))
    if environment_of(recipe) is not None:
        return f"{recipe.version}, in an environment of its own"
    return f"{recipe.version}, its environment is made on first use (or: parity-audit envs create {name})"


def _uv() -> tuple[str, bool, str]:
    try:
        from uv import find_uv_bin

        return "uv", True, find_uv_bin()
    except (ImportError, FileNotFoundError) as error:
        return "uv", False, f"cannot make environments: {error}"


def _cache() -> tuple[str, bool, str]:
    root = cache_root()
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        return "cache", False, f"{root} cannot be written; set PARITY_AUDIT_CACHE"
    return "cache", True, f"{root}, {shutil.disk_usage(parent).free / 2**30:.0f} GiB free"


def _cuda() -> tuple[str, bool, str]:
    if shutil.which("nvidia-smi") is None:
        return "cuda", False, "no nvidia-smi: backends run on the CPU"
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "cuda", done.returncode == 0, (done.stdout or done.stderr).strip().splitlines()[0]


def _memory() -> tuple[str, bool, str]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return "memory", total > 4, f"{total:.0f} GiB, {os.cpu_count()} CPUs"
