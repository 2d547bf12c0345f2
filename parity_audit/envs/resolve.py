"""Which release of every dependency an environment gets: those of the day on which its engine was released.

A release that declares `transformers>=4.43` was written against the transformers of its day, and breaks with a later one that
renamed what it reads. The index says when a release was uploaded, and uv can leave out everything that is newer. torch is the
exception: it is the release that the recipe names, since an old one may have no build for the CPU at hand, and what torch itself
needs may be newer as well.

A resolution is kept in the cache, so that an environment that is made again holds the same versions. Tested releases are
shipped with a lock.
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
    """`name==version` of every package, the day they are of ("" where the index does not say), and options for uv."""

    pins: tuple[str, ...]
    date: str = ""
    options: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """Version by package."""
        return dict(pin.split("==", 1) for pin in self.pins)

    def text(self) -> str:
        """As `read` reads it: a requirements file with two comments."""
        return "".join(
            f"{line}\n" for line in (f"# date: {self.date}", f"# options: {' '.join(self.options)}", *self.pins)
        )

    @staticmethod
    def read(text: str) -> Resolution:
        """A resolution from the text of a requirements file."""
        header = dict(HEADER.findall(text))
        pins = tuple(f"{name.lower()}=={version}" for name, version in PIN.findall(text))
        return Resolution(pins=pins, date=header.get("date", ""), options=tuple(header.get("options", "").split()))


def known_resolution(recipe: Recipe) -> Resolution | None:
    """The resolution that was made for this recipe before; None where uv has yet to be asked."""
    try:
        return Resolution.read(_file(recipe).read_text())
    except FileNotFoundError:
        return None


def resolve(recipe: Recipe) -> Resolution:
    """The resolution of a recipe, asked of uv once and then kept.

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
    """Ask again next time: this resolution does not work."""
    _file(recipe).unlink(missing_ok=True)


def release_date(recipe: Recipe) -> str:
    """The day up to which dependencies of an engine may have been uploaded; "" where the index does not say.

    Raises:
        EnvFailed: the index does not have that release.
    """
    pinned = f"{recipe.package}=={recipe.version}"
    days = indexed(pinned, recipe.python, what=f"{recipe.package} {recipe.version} cannot be installed").days
    if not days:
        return ""
    return (datetime.date.fromisoformat(max(days)) + datetime.timedelta(days=DAYS_AFTER)).isoformat()


def _of_the_right_torch(recipe: Recipe, date: str) -> Resolution:
    """The first resolution whose torch is built for the recipe's device, of those that uv's options lead to."""
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
    """Torch and what it needs as they are today, everything else as of the date."""
    what = f"{recipe.package} {recipe.version} cannot be installed"
    dated = ["--exclude-newer", date] if date else []
    if date:
        today = _compile(recipe, (recipe.torch,), *options, what=what)
        dated += [part for name, _ in PIN.findall(today) for part in ("--exclude-newer-package", f"{name}=false")]
    found = _compile(recipe, (recipe.torch, *recipe.requirements), *dated, *options, what=what)
    return Resolution(pins=(*Resolution.read(found).pins, *recipe.alone), date=date, options=options)


def _compile(recipe: Recipe, requirements: tuple[str, ...], *options: str, what: str) -> str:
    """What uv resolves these requirements to, under the recipe's lock and overrides."""
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
