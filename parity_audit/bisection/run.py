"""Bisect between two releases to find those at which faults appear or disappear."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from parity_audit.bisection.observe import Observer
from parity_audit.bisection.search import neighbours
from parity_audit.capture.workspace import slug
from parity_audit.core.bisection import UNEXPLAINED, BisectReport, Change, Observation
from parity_audit.core.errors import EXIT_NOT_JUDGED, EXIT_OK, NotJudged, UsageError
from parity_audit.core.jsonio import dumps
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef
from parity_audit.envs.recipes import parse_version, recipe_for
from parity_audit.envs.releases import Release, by_date, releases_between
from parity_audit.report.environment import this_machine
from parity_audit.workers.client import TIMEOUT

CHEAP = ("short",)
"""The probes on which releases are run, unless both ends agree on them."""
NAME = "bisect.json"
SAME_VALUE = 0.01
"""Relative difference up to which two values of a fault are the same: fitted values of one constant in two releases
differ by rounding, those of two constants by more."""


def run_bisection(
    model: str,
    backend: BackendRef,
    *,
    good: str,
    bad: str,
    reference: str = "hf",
    seed: int = 0,
    install: bool = True,
    timeout: float = TIMEOUT,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> BisectReport:
    """Find the releases that broke or repaired parity, on a miniature of a model.

    Args:
        backend: a backend without a version; its settings apply to every release.
        good: a release without the fault; older than `bad` to find what broke it, newer to find what repaired it.
        bad: a release with the fault.
        out: folder for bisect.json, every release's report and the observations; a second run continues from them.

    Raises:
        UsageError: a version is invalid, both ends are the same, or the backend has no releases.
        EnvFailed: the index does not have one of the ends.
        NotJudged: an end could not be judged, or both ends have the same faults.
    """
    started = time.perf_counter()
    _check(backend, good, bad)
    out = out or Path("reports") / f"bisect-{slug(model)}-{backend.name}"
    recipe = recipe_for(backend)
    low, high = sorted((good, bad), key=lambda text: parse_version(text, backend))
    releases, dated = by_date(releases_between(recipe.package, low, high, recipe.python, progress))
    observer = Observer(
        model=model, backend=backend, reference=reference, seed=seed, install=install, timeout=timeout, out=out,
        progress=progress,
    )  # fmt: skip
    observer.recall()
    place = {release.version: number for number, release in enumerate(releases)}
    ends = tuple(sorted((place[good], place[bad])))
    probes, faults = _faults(observer, releases[place[good]], releases[place[bad]])
    changes = tuple(
        _change(observer, releases, (ends[0], ends[1]), probes, fault, value) for fault, value in faults.items()
    )
    report = BisectReport(
        model=model, backend=str(backend), reference=reference, good=good, bad=bad, probes=probes, changes=changes,
        order="release date" if dated else "version: the index does not say when each release was uploaded",
        observations=tuple(seen for one in releases if (seen := observer.known(one, probes))), environment=this_machine(),
        seconds=time.perf_counter() - started, exit_code=EXIT_OK if changes else EXIT_NOT_JUDGED,
    )  # fmt: skip
    (out / NAME).write_text(dumps(report, indent=1) + "\n")
    return report


def _check(backend: BackendRef, good: str, bad: str) -> None:
    if backend.target is not None or backend.name == "spec" or backend.version is not None:
        raise UsageError(
            f"`{backend}` has no releases to search", code="bisect-backend",
            expected="a backend without a version: hf, transformer_lens, nnsight, vllm or sglang",
        )  # fmt: skip
    if parse_version(good, backend) == parse_version(bad, backend):
        raise UsageError(f"--good and --bad are both {good}", code="bisect-ends", expected="two releases")


def _faults(observer: Observer, good: Release, bad: Release) -> tuple[tuple[str, ...], dict[str, str]]:
    """The cheapest probes on which the ends differ, and the faults of the bad end that the good end does not have."""
    for probes in (CHEAP, ()):
        observer.observe_all((good, bad), probes)
        clean, faulty = (_end(observer, release, probes) for release in (good, bad))
        found = {fault: value for fault, value in faulty.faults.items() if not shows(clean, fault, value)}
        if found:
            return probes, found
    raise NotJudged(
        f"{good.version} and {bad.version} look alike: {', '.join(clean.faults) or 'no fault'} in both", code="bisect-alike",
        hint="give two releases of which one has a fault that the other has not; their reports are in the output folder",
    )  # fmt: skip


def shows(seen: Observation, fault: str, value: str) -> bool:
    """Whether a release has a fault with this value; another value of the same constant is another fault."""
    other = seen.faults.get(fault)
    if other is None or fault == UNEXPLAINED:
        return other is not None
    try:
        return math.isclose(float(other), float(value), rel_tol=SAME_VALUE)
    except ValueError:
        return other == value


def _end(observer: Observer, release: Release, probes: tuple[str, ...]) -> Observation:
    seen = observer.observe(release, probes)
    if seen.skipped:
        raise NotJudged(
            f"{release.version} cannot be judged: {seen.skipped}",
            code="bisect-end",
            hint="name another release for this end",
        )
    return seen


def _change(
    observer: Observer,
    releases: Sequence[Release],
    ends: tuple[int, int],
    probes: tuple[str, ...],
    fault: str,
    value: str,
) -> Change:
    """Find the neighbouring releases between which one fault appears or disappears."""

    def faulty(place: int) -> bool | None:
        seen = observer.observe(releases[place], probes)
        return None if seen.skipped else shows(seen, fault, value)

    before, after = neighbours(*ends, faulty)
    clean = observer.observe(releases[before if faulty(after) else after], probes)
    return Change(
        fault=fault, kind="broke" if faulty(after) else "repaired", release=releases[after].version,
        date=releases[after].date, before=releases[before].version, value=value, otherwise=clean.faults.get(fault, ""),
        unknown=tuple(one.version for one in releases[before + 1 : after]),
    )  # fmt: skip
