"""Write the lock files of tested releases, which are shipped: `python -m parity_audit.envs.lock`.

Each release is resolved with the dependencies of the day on which it was uploaded. torch and its CUDA libraries are
left out, because the build to install depends on the machine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parity_audit.core.types import BackendRef
from parity_audit.envs.recipes import LOCKS, recipe_for, table
from parity_audit.envs.resolve import Resolution, resolve


def write_locks(folder: Path) -> list[Path]:
    """Write one file per tested release with `name==version` of all packages but torch, and return the files.

    Raises EnvFailed if a release cannot be resolved.
    """
    folder.mkdir(exist_ok=True)
    known = [(name, version) for name, entry in table()["backends"].items() for version in entry["known"]]
    return [_write(BackendRef(name=name, version=version), folder) for name, version in known]


def _write(ref: BackendRef, folder: Path) -> Path:
    recipe = dataclasses.replace(recipe_for(ref), locked=())
    path = folder / f"{recipe.package}-{recipe.version}.txt"
    path.write_text("".join(f"{pin}\n" for pin in without_torch(resolve(recipe))))
    return path


def without_torch(resolution: Resolution) -> list[str]:
    """Return the pins that are valid for every build of torch."""
    return [pin for pin in resolution.pins if not pin.startswith(("torch==", "triton==", "nvidia-", "cuda-"))]


if __name__ == "__main__":
    for written in write_locks(Path(__file__).with_name(LOCKS)):
        print(written)
