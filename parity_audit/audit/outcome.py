"""From results to the Report: errors as candidates, the exit code, the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity_audit.capture.store import Capture
from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK, CannotRun, ParityError
from parity_audit.core.report import Candidate, Side, Verdict
from parity_audit.core.types import BackendRef

GOOD = (Verdict.EXACT, Verdict.PARITY)
UNJUDGED = (Verdict.ERROR, Verdict.INCONCLUSIVE)


def failed_candidate(ref: BackendRef, error: ParityError, dtype: str, device: str) -> Candidate:
    """A candidate that could not be judged; the error says what died and what to do."""
    return Candidate(
        backend=ref.name, package=ref.name, version=ref.version or "", settings=ref.settings, dtype=dtype, device=device,
        verdict=Verdict.ERROR, why=error.message, error=error.to_json(),
    )  # fmt: skip


def exit_code_of(candidates: Sequence[Candidate], *, accept_patched: bool) -> int:
    """0 when every candidate is at parity, 3 when one could not be judged, else 1.

    Could-not-judge wins over mismatch: a gate that reads 1 as "known bad" must not hide a dead backend. A release
    that is known not to run the architecture says nothing about the others; alone, it leaves nothing judged.
    """
    able = [candidate for candidate in candidates if (candidate.error or {}).get("code") != CannotRun.default_code]
    if not able or any(candidate.verdict in UNJUDGED for candidate in able):
        return EXIT_NOT_JUDGED
    wrong = [candidate for candidate in able if candidate.verdict not in GOOD]
    if accept_patched:
        wrong = [item for item in wrong if not _remedied(item)]
    return EXIT_MISMATCH if wrong else EXIT_OK


def _remedied(item: Candidate) -> bool:
    """Whether a patch, or a right reference in place of a wrong one, was seen to bring parity."""
    seen = [part.verdict for part in (item.patched, item.right_reference) if part is not None]
    return any(verdict in GOOD for verdict in seen)


def side_of(capture: Capture, self_check: Sequence[str] = ()) -> Side:
    """The reference or the judge as it ran."""
    manifest = capture.manifest
    about = manifest.description
    return Side(
        backend=about.backend if about else manifest.backend,
        package=about.package if about else "",
        version=about.version if about else "",
        settings=about.settings if about else {},
        dtype=manifest.dtype,
        device=manifest.device,
        self_check=tuple(self_check),
    )


def backend_facts(captures: Sequence[Capture]) -> dict[str, Any]:
    """Versions and numerics of every backend that ran: a report holds for these."""
    return {
        capture.manifest.backend: {**about.versions, **about.numerics}
        for capture in captures
        if (about := capture.manifest.description) is not None
    }
