"""Judge releases and keep the results on disk, so that a bisection that was interrupted can continue."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parity_audit.api import audit
from parity_audit.core.bisection import UNEXPLAINED, Observation
from parity_audit.core.errors import ParityError, UsageError
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.progress import Progress
from parity_audit.core.report import Candidate, Verdict
from parity_audit.core.types import BackendRef
from parity_audit.core.whole_file import write_whole
from parity_audit.envs.releases import Release
from parity_audit.report.numbers import shown

KEPT = "observations.json"
JUDGED = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH)


@dataclass
class Observer:
    """Judges releases of a backend on one model, each release only once for the same probes."""

    model: str
    backend: BackendRef
    reference: str
    seed: int
    install: bool
    timeout: float
    out: Path
    progress: Progress
    kept: dict[str, Observation] = field(default_factory=dict)

    def observe(self, release: Release, probes: tuple[str, ...]) -> Observation:
        """Run one release, or return what an earlier run with the same model, settings and probes observed."""
        return self.observe_all([release], probes)[0]

    def observe_all(self, releases: Sequence[Release], probes: tuple[str, ...]) -> list[Observation]:
        """Run several releases, which share the runs of their reference, or return earlier observations."""
        missing = [one for one in releases if self._key(one, probes) not in self.kept]
        if missing:
            found = zip(missing, self._run(missing, probes), strict=True)
            self.kept |= {self._key(one, probes): seen for one, seen in found}
            self._keep()
        return [self.kept[self._key(one, probes)] for one in releases]

    def known(self, release: Release, probes: tuple[str, ...]) -> Observation | None:
        """The observation of a release, None if it was not run."""
        return self.kept.get(self._key(release, probes))

    def recall(self) -> None:
        """Load the observations that an earlier run left in the folder, except skipped releases, which are tried again."""
        try:
            stored = json.loads((self.out / KEPT).read_text())
            found = from_plain(dict[str, Observation], stored)
        except (OSError, ValueError, TypeError):
            return
        self.kept = {key: seen for key, seen in found.items() if not seen.skipped}

    def _key(self, release: Release, probes: tuple[str, ...]) -> str:
        """A key of everything that the observation depends on."""
        return f"{self.model} {self.reference} {self._ref(release)} seed {self.seed} {' '.join(probes) or 'all probes'}"

    def _ref(self, release: Release) -> BackendRef:
        return replace(self.backend, version=release.version)

    def _run(self, releases: Sequence[Release], probes: tuple[str, ...]) -> list[Observation]:
        """Audit all releases at once, so that the reference runs only once; if that fails, audit each release by
        itself."""
        started = time.perf_counter()
        try:
            report = audit(
                self.model, candidates=[self._ref(one) for one in releases], reference=self.reference, miniature="mini",
                seed=self.seed, probes=probes or None, repair=False, limits=False, install=self.install,
                timeout=self.timeout, out=self.out / "-".join(one.version for one in releases), progress=self.progress,
            )  # fmt: skip
            seen = [_seen(one) for one in report.candidates]
        except UsageError:
            raise
        except ParityError as error:
            if len(releases) > 1:
                return [seen for one in releases for seen in self._run([one], probes)]
            seen = [{"skipped": error.message}]
        each = (time.perf_counter() - started) / len(releases)
        return [
            Observation(version=release.version, date=release.date, seconds=each, **own)
            for release, own in zip(releases, seen, strict=True)
        ]

    def _keep(self) -> None:
        write_whole(self.out / KEPT, dumps(self.kept, indent=1) + "\n")


def _seen(one: Candidate) -> dict[str, Any]:
    """The part of an observation that follows from a candidate's result."""
    if one.verdict not in JUDGED:
        return {"skipped": one.why}
    own = {
        finding.knob: shown(finding.candidate_value)
        for finding in one.findings if finding.departs_from_spec != "reference"
    }  # fmt: skip
    unexplained = {UNEXPLAINED: one.why} if one.verdict is Verdict.MISMATCH and not one.findings else {}
    return {"verdict": one.verdict.value, "faults": {**own, **unexplained}}
