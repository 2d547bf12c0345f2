"""Choose the release of every dependency of an environment: the newest that existed when the engine was released.

A release that declares `transformers>=4.43` was written for the transformers of its day, and fails with a later one in
which names that it uses have changed. The index tells when each release was uploaded, and uv can leave out everything
newer. torch is the exception: its release is the one that the recipe names, because an old one may have no build for
this CPU. The dependencies of torch may be newer as well.

A resolution is cached, so that an environment that is made again has the same versions. Tested releases are shipped
with a lock file.
"""

from __future__ import annotations

import datetime
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from parity_audit.cache.root import cache_root
from parity_audit.core.errors import EnvFailed
from parity_audit.core.whole_file import write_whole
from parity_audit.envs.recipes import Recipe
from parity_audit.envs.releases import indexed
from parity_audit.envs.torch_build import is_for, torch_options
from parity_audit.envs.uv import run_uv

DAYS_AFTER = 2  # wheels of one release are uploaded over hours, and its dependencies' fixes follow within a day
HEADER = re.compile(r"^# (date|options): (.*)$", re.MULTILINE)
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The pins `name==version` of all packages, their latest upload day ("" if it is not limited), and options for uv."""

    pins: tuple[str, ...]
    date: str = ""
    options: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """The versions by package name."""
        return dict(pin.split("==", 1) for pin in self.pins)

    def text(self) -> str:
        """Return the resolution as a requirements file with two comment lines, which `read` can read."""
        return "".join(
            f"{line}\n" for line in (f"# date: {self.date}", f"# options: {' '.join(self.options)}", *self.pins)
        )

    @staticmethod
    def read(text: str) -> Resolution:
        """Return the resolution in the text of a requirements file."""
        header = dict(HEADER.findall(text))
        pins = tuple(f"{name.lower()}=={version}" for name, version in PIN.findall(text))
        return Resolution(pins=pins, date=header.get("date", ""), options=tuple(header.get("options", "").split()))


def known_resolution(recipe: Recipe) -> Resolution | None:
    """Return the cached resolution of this recipe; None if it has not been resolved yet."""
    try:
        return Resolution.read(_file(recipe).read_text())
    except FileNotFoundError:
        return None


def resolve(recipe: Recipe) -> Resolution:
    """Return the resolution of a recipe, from the cache or else from uv.

    Raises:
        EnvFailed: no set of releases satisfies the recipe, or there is no torch for its device.
    """
    known = known_resolution(recipe)
    if known is not None:
        return known
    date = "" if recipe.locked else release_date(recipe)
    found = _of_the_right_torch(recipe, date)
    write_whole(_file(recipe), found.text())
    return found


def forget(recipe: Recipe) -> None:
    """Delete the cached resolution of a recipe because it does not work; the next `resolve` asks uv again."""
    _file(recipe).unlink(missing_ok=True)


def release_date(recipe: Recipe) -> str:
    """Return the last day on which the dependencies of an engine may have been uploaded; "" if the index has no upload dates.

    Raises:
        EnvFailed: the index does not have that release.
    """
    pinned = f"{recipe.package}=={recipe.version}"
    days = indexed(pinned, recipe.python, what=f"{recipe.package} {recipe.version} cannot be installed").days
    if not days:
        return ""
    return (datetime.date.fromisoformat(max(days)) + datetime.timedelta(days=DAYS_AFTER)).isoformat()


def _of_the_right_torch(recipe: Recipe, date: str) -> Resolution:
    """Try uv's options for torch in turn, and return the first resolution whose torch is built for the recipe's device."""
    wrong_build, failures = False, []
    for options in torch_options(recipe.device):
        try:
            found = _compiled(recipe, date, options)
        except EnvFailed as error:
            failures.append(error)
            continue
        if is_for(recipe.device, found.versions.items()):
            return found
        wrong_build = True
    if not wrong_build:
        raise failures[0]
    raise EnvFailed(
        f"no torch built for the {recipe.device} can be had for {recipe.package} {recipe.version}",
        found=failures[-1].found if failures else "only builds for another device",
        hint="let UV_FIND_LINKS name a folder with such a wheel, or set UV_TORCH_BACKEND to a backend of uv",
    )


def _compiled(recipe: Recipe, date: str, options: tuple[str, ...]) -> Resolution:
    """Return a resolution with torch and its dependencies as of today, and all other packages as of the date."""
    what = f"{recipe.package} {recipe.version} cannot be installed"
    dated = ["--exclude-newer", date] if date else []
    if date:
        today = _compile(recipe, (recipe.torch,), *options, what=what)
        dated += [part for name, _ in PIN.findall(today) for part in ("--exclude-newer-package", f"{name}=false")]
    found = _compile(recipe, (recipe.torch, *recipe.requirements), *dated, *options, what=what)
    return Resolution(pins=(*Resolution.read(found).pins, *recipe.alone), date=date, options=options)


def _compile(recipe: Recipe, requirements: tuple[str, ...], *options: str, what: str) -> str:
    """Return uv's resolution of these requirements, as text, with the recipe's lock as constraints and its overrides."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = _written(Path(folder) / "constraints.txt", recipe.locked)
        overrides = _written(Path(folder) / "overrides.txt", recipe.overrides)
        return run_uv(
            "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", recipe.python,
            "--constraint", constraints, "--override", overrides, *options, "-",
            what=what, text="\n".join(requirements), downloads=False,
        )  # fmt: skip


def _written(path: Path, lines: tuple[str, ...]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def _file(recipe: Recipe) -> Path:
    return cache_root() / "resolutions" / f"{recipe.key}.txt"
