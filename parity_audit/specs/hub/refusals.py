"""Turn each exception of a failed download into an error that tells the user what to do."""

from __future__ import annotations

import errno

from parity_audit.core.errors import NotJudged, ParityError, UsageError
from parity_audit.specs.hub.library import exceptions

WITHOUT = "give --weights DIR, or run `--miniature` (needs no download)"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNAUTHORISED, FORBIDDEN = 401, 403


def refusal(error: Exception, repo_id: str, revision: str = "", *, beside: str = "") -> ParityError:
    """Return the error to raise for an exception that the hub library raised.

    Releases of the library use different HTTP clients, each with its own exceptions. So an exception that is not of one of the
    library's own classes is classified by its errno and its HTTP status.

    Args:
        beside: text to append to the hint, for example that the working directory has a checkpoint of this name.
    """
    raised = exceptions()

    status = getattr(getattr(error, "response", None), "status_code", None)
    hint = WITHOUT + beside
    if isinstance(error, raised.RevisionNotFoundError):
        return UsageError(
            f"`{repo_id}` has no revision `{revision}` on the hub", code="unknown-revision",
            hint="a branch, a tag or a full commit id goes after the @",
        )  # fmt: skip
    if isinstance(error, raised.GatedRepoError) or status == FORBIDDEN:
        return _unavailable(
            f"the hub has `{repo_id}` behind a licence, and this account may not read it",
            f"accept it on the model's page and log in (`hf auth login`, or HF_TOKEN), {hint}", code="gated-model",
        )  # fmt: skip
    if isinstance(error, raised.RepositoryNotFoundError) or status == UNAUTHORISED:
        return _unavailable(
            f"the hub has no `{repo_id}` that it would show to this account",
            f"check the name; a private model needs a login (`hf auth login`, or HF_TOKEN); else {hint}",
        )
    if isinstance(error, raised.OfflineModeIsEnabled) or isinstance(error.__cause__, raised.OfflineModeIsEnabled):
        return _unavailable(f"no weights of `{repo_id}` here, and offline mode is on (HF_HUB_OFFLINE)", hint)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return NotJudged(
            f"the disk is full: {error.strerror}", code="disk", where=str(error.filename or ""),
            hint="make room, or set HF_HOME to a larger disk; the files that have arrived are kept",
        )  # fmt: skip
    if isinstance(error, raised.LocalEntryNotFoundError) or status is None:
        return _cut(repo_id, str(error).strip().partition("\n")[0] or type(error).__name__, beside)
    return _cut(repo_id, f"it answered {status}", beside)


def _unavailable(message: str, hint: str, *, code: str = "missing-weights") -> NotJudged:
    return NotJudged(message, code=code, hint=hint)


def _cut(repo_id: str, why: str, beside: str) -> NotJudged:
    return NotJudged(
        f"the hub did not give `{repo_id}` to the end: {why}", code="hub-unreachable",
        hint=f"run the same command again: it goes on from the files that have arrived; or {WITHOUT}{beside}",
    )  # fmt: skip
