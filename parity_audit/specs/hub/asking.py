"""Ask the hub for a model that has no spec and is not on this disk; only its config.json is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parity_audit.specs.hub.library import exceptions
from parity_audit.specs.hub.refusals import refusal

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer; the hub library by itself would keep trying for half a minute."""


@dataclass(frozen=True, kw_only=True)
class HubAnswer:
    """The directory that now holds config.json, or in `why` the reason why it could not be fetched."""

    folder: Path | None = None
    why: str = ""


def ask_hub(repo_id: str, revision: str = "") -> HubAnswer:
    """Fetch config.json of a repository into the user's hub cache, with the offline mode and endpoint set for the hub library.

    Raises:
        UsageError: the hub has the repository but not this revision.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    raised = exceptions()

    try:
        try_to_load_from_cache(repo_id, "config.json")  # raises an error for a malformed id before the hub is contacted
        silent = _unreachable_reason()
        if silent:
            return HubAnswer(why=silent)
        return HubAnswer(folder=Path(hf_hub_download(repo_id, "config.json", revision=revision or None)).parent)
    except raised.HFValidationError:
        return HubAnswer(why="it is not a hub id either")
    except raised.GatedRepoError:
        return HubAnswer(why="the hub has it behind a licence: accept it there and log in")
    except raised.RevisionNotFoundError as error:
        raise refusal(error, repo_id, revision) from error
    except raised.LocalEntryNotFoundError as error:  # before EntryNotFoundError, of which it is a subclass
        return HubAnswer(why=f"the hub did not give it: {error}")
    except raised.EntryNotFoundError:
        return HubAnswer(why="the hub has it without a config.json: an adapter, or weights in another form")
    except (raised.HfHubHTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        missing = status in (401, 404)  # the hub answers 401 both for unknown names and for private ones
        return HubAnswer(why="the hub does not know it either" if missing else f"the hub did not give it: {error}")


def _unreachable_reason() -> str:
    """Return why the hub cannot be reached; an empty string if it answers, whatever the status."""
    from huggingface_hub import constants, get_session

    raised = exceptions()

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except raised.OfflineModeIsEnabled:
        return "the hub was not asked: offline mode is on (HF_HUB_OFFLINE)"
    except Exception as error:  # releases of the hub library differ in HTTP client and exceptions
        return f"the hub could not be reached ({error})"
    return ""
