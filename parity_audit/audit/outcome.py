"""Parts of the report that follow from the results: candidates that failed, the exit code, the sides, the backends."""

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
    """Return the result of a candidate that could not be judged; the error says what failed and what to do."""
    return Candidate(
        backend=ref.name, package=ref.name, version=ref.version or "", settings=ref.settings, dtype=dtype, device=device,
        verdict=Verdict.ERROR, why=error.message, error=error.to_json(),
    )  # fmt: skip


def exit_code_of(candidates: Sequence[Candidate], *, accept_patched: bool) -> int:
    """Return 0 if every candidate is at parity, 3 if a candidate could not be judged, and 1 otherwise.

    With `accept_patched` a candidate that a patch, or a reference that follows the spec, brings to parity counts as parity.

    A candidate that could not be judged takes precedence over a mismatch: a continuous-integration job that accepts 1 as a
    known mismatch must still fail when a backend does not run. A release that is known not to run the architecture is left
    out; if nothing else is left, nothing was judged, and the code is 3.
    """
    able = [candidate for candidate in candidates if (candidate.error or {}).get("code") != CannotRun.default_code]
    if not able or any(candidate.verdict in UNJUDGED for candidate in able):
        return EXIT_NOT_JUDGED
    wrong = [candidate for candidate in able if candidate.verdict not in GOOD]
    if accept_patched:
        wrong = [item for item in wrong if not _remedied(item)]
    return EXIT_MISMATCH if wrong else EXIT_OK


def _remedied(item: Candidate) -> bool:
    """Return whether a run showed parity with a patch, or with a reference that follows the spec instead of the given one."""
    seen = [part.verdict for part in (item.patched, item.right_reference) if part is not None]
    return any(verdict in GOOD for verdict in seen)


def side_of(capture: Capture, self_check: Sequence[str] = ()) -> Side:
    """Return the description of the reference or the judge, from its capture, for the report."""
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
    """Return versions and numerical settings of every backend that ran; the report is valid for these."""
    return {
        capture.manifest.backend: {**about.versions, **about.numerics}
        for capture in captures
        if (about := capture.manifest.description) is not None
    }
