"""Find out with git which spec files and which pins of engines a change touches."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from parity_audit.core.errors import SpecError, UsageError
from parity_audit.gate.pins import PIN_FILES, Pin, pins
from parity_audit.specs.load import read_yaml


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Spec files and pins that are new or changed since a commit.

    Paths are relative to `root`, the root of the repository. `files` is the number of all new or changed files.
    """

    root: Path
    specs: tuple[Path, ...]
    pins: tuple[Pin, ...]
    files: int


def repository(folder: Path) -> Path:
    """Return the root of the git repository that contains a folder.

    Raises:
        UsageError: the folder is in no repository, or git is not installed.
    """
    return Path(_git(folder, "rev-parse", "--show-toplevel").strip())


def changes_since(since: str, specs: Path, folder: Path) -> Changes:
    """Return what changed since this branch left `since`, uncommitted and untracked files included.

    Deleted files are not counted.

    Args:
        since: commit or branch; the change is counted from its merge base with HEAD.
        specs: the folder of specs. A spec also counts as changed if a spec that it extends has changed.
        folder: a folder in the repository.

    Raises:
        UsageError: there is no repository or no such commit, or git is not installed.
    """
    root = repository(folder)
    base = _git(root, "merge-base", since, "HEAD").strip()
    listed = _git(root, "diff", "--name-only", "--diff-filter=d", "-z", base)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    files = {Path(name) for name in (listed + untracked).split("\0") if name}
    own = specs.resolve()
    touched = {(root / file).resolve() for file in files if (root / file).resolve().parent == own}
    return Changes(
        root=root,
        specs=tuple(path.relative_to(root.resolve()) for path in _with_children(own, touched)),
        pins=tuple(pin for file in sorted(files) if PIN_FILES.search(file.name) for pin in _new_pins(root, base, file)),
        files=len(files),
    )


def _with_children(folder: Path, touched: set[Path]) -> list[Path]:
    """Return the changed spec files and the specs of the folder that extend one of them, directly or not.

    Family files (`_*.yaml`) are not returned themselves, but the specs that extend them are.
    """
    found, everything = set(touched), {path: _parent(path) for path in sorted(folder.glob("*.yaml"))}
    for _ in everything:
        names = {path.stem for path in found}
        found |= {path for path, parent in everything.items() if parent in names}
    return sorted(path for path in found if path.suffix == ".yaml" and not path.name.startswith("_"))


def _parent(path: Path) -> str:
    """Return the name of the spec that a spec extends; empty if there is none or the file is broken.

    A broken file is reported by the check of that spec.
    """
    try:
        return str(read_yaml(path).get("extends", ""))
    except SpecError:
        return ""


def _new_pins(root: Path, base: str, file: Path) -> list[Pin]:
    """Return the pins in a file that are not in its version at the commit `base`; all of them if it did not exist then."""
    before = subprocess.run(["git", "show", f"{base}:{file.as_posix()}"], cwd=root, capture_output=True, text=True)
    known = set() if before.returncode else {str(pin.backend) for pin in pins(before.stdout, str(file))}
    text = (root / file).read_text(errors="replace")
    return [pin for pin in pins(text, str(file)) if str(pin.backend) not in known]


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UsageError(
            "git is not installed", code="git", hint="give a matrix file instead: --matrix FILE"
        ) from error
    if done.returncode != 0:
        raise UsageError(
            f"`git {' '.join(args)}` failed", code="git", where=str(folder), found=done.stderr.strip()[-300:],
            hint="fetch the whole history (actions/checkout with `fetch-depth: 0`), and name a commit or branch",
        )  # fmt: skip
    return done.stdout
