"""Find the releases of a package and their upload dates. uv is asked, so the answer comes from the index that the user has set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from parity_audit.core.errors import EnvFailed
from parity_audit.core.progress import SILENT, Progress
from parity_audit.envs.uv import run_uv

UPLOADED = re.compile(r"upload-time = (\d{4}-\d{2}-\d{2})")
VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """The newest release that satisfies a requirement, and the days on which its files were uploaded."""

    version: str
    days: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release; `date` (ISO) is the first day on which its files were uploaded, "" if the index does not tell."""

    version: str
    date: str


def indexed(requirement: str, python: str, *, what: str) -> Indexed:
    """Return the newest release in the index that satisfies a requirement and can be installed for this version of Python.

    Raises:
        EnvFailed: no release satisfies it; the message begins with `what`.
    """
    lock = run_uv(
        "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml", "--python-version", python, "-",
        what=what, text=requirement, downloads=False,
    )  # fmt: skip
    found = VERSION.findall(lock)
    if not found:
        raise EnvFailed(what, found="uv named no version")
    return Indexed(version=found[-1], days=tuple(UPLOADED.findall(lock)))


def releases_between(package: str, first: str, last: str, python: str, progress: Progress = SILENT) -> list[Release]:
    """Return every release from `first` to `last`, both included, that this Python can install, sorted by version.

    Pre-releases are left out, unless `first` or `last` is one.

    Raises:
        EnvFailed: the index does not have `first` or `last`.
    """
    newest = _release(package, f"=={last}", python)
    found = [newest]
    for release in _older(package, first, newest, python):
        progress.update("releases", f"{package} {release.version}")
        found.append(release)
    if found[-1].version != first:
        found.append(_release(package, f"=={first}", python))
    return sorted(found, key=lambda release: Version(release.version))


def by_date(releases: list[Release]) -> tuple[list[Release], bool]:
    """Return the releases sorted by upload date, and whether all dates are known; if not, they are sorted by version."""
    known = all(release.date for release in releases)
    return sorted(releases, key=lambda one: (one.date if known else "", Version(one.version))), known


def _older(package: str, first: str, newest: Release, python: str) -> Iterator[Release]:
    """Yield the releases from the one before `newest` down to `first`."""
    below = newest.version
    while Version(below) > Version(first):
        try:
            found = _release(package, f"<{below},>={first}", python)
        except EnvFailed:
            return
        yield found
        below = found.version


def _release(package: str, which: str, python: str) -> Release:
    one = indexed(f"{package}{which}", python, what=f"no release of {package} {which} can be installed")
    return Release(version=one.version, date=min(one.days, default=""))
