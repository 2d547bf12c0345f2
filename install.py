#!/usr/bin/env python3
"""Make .venv with parity-audit in it, and with the build of torch that this machine can use.

Without `--torch`: a CUDA build where a CUDA device answers, else a CPU build. A wheel at hand (PIP_FIND_LINKS) is taken where it
is of that kind. With `--test` the package is editable, and comes with what its tests need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from parity_audit.envs.torch_build import cuda_answers, is_for, torch_options

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = str(VENV / "bin" / "python")
PIP = (PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check")
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))


def main() -> int:
    """Exit code of the installer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--test", action="store_true", help="editable, with what the tests need")
    parser.add_argument(
        "--torch", choices=("cpu", "cuda"), help="which build of torch; by default what this machine has"
    )
    asked = parser.parse_args()
    venv.create(VENV, with_pip=True, symlinks=True)
    return _install(("-e", f"{ROOT}[test]") if asked.test else (str(ROOT),), asked.torch or _device())


def _device() -> str:
    return "cuda" if cuda_answers() else "cpu"


def _install(what: tuple[str, ...], device: str) -> int:
    """From where pip is set up to look, where the torch there is of the right build, else from an index that has one."""
    code = 1
    subprocess.run([*PIP, "install", *CONSTRAINTS, "uv"], check=True)
    for options in torch_options(device):
        if options:
            code = _with_uv((*options, *CONSTRAINTS, *what))
        elif is_for(device, found := _torch_of_pip()):
            builds = [f"torch=={version}" for name, version in found if name == "torch" and "+" in version]
            # uv is ten times faster; where it does not find the very build of torch that pip would take, pip installs.
            code = _with_uv((*CONSTRAINTS, *builds, *what), stderr=subprocess.DEVNULL) if builds else 1
            code = code and subprocess.run([*PIP, "install", *CONSTRAINTS, *what]).returncode
        if code == 0:
            return 0
    print(f"no build of torch for {device} could be installed: put one where PIP_FIND_LINKS points", file=sys.stderr)
    return code


def _with_uv(arguments: tuple[str, ...], stderr: int | None = None) -> int:
    """Exit code of uv, which also looks where PIP_FIND_LINKS points.

    Modules are compiled by the first command that imports them; where commands write no bytecode (PYTHONDONTWRITEBYTECODE, as in
    many images) at once, or each command would compile them again, in some six seconds.
    """
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    uv = (str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", PYTHON)
    compiled = ("--compile-bytecode",) if sys.dont_write_bytecode else ()
    return subprocess.run([*uv, *compiled, *arguments], env={**links, **os.environ}, stderr=stderr).returncode


def _torch_of_pip() -> list[tuple[str, str]]:
    """(name, version) of torch and what it needs, as pip would install them; nothing is downloaded but metadata."""
    dry = subprocess.run(
        [*PIP, "install", "--dry-run", "--ignore-installed", "--report", "-", *CONSTRAINTS, "torch"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = [item["metadata"] for item in json.loads(dry.stdout)["install"]]
    return [(str(item["name"]).lower(), str(item["version"])) for item in found]


if __name__ == "__main__":
    sys.exit(main())
