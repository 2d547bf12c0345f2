"""Ask the hub for a model that is neither in a spec nor on this disk: its config.json and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parity_audit.specs.hub.library import exceptions
from parity_audit.specs.hub.refusals import refusal

PATIENCE = 5.0
"""Seconds to wait for the hub's first answer; the hub library alone would try for half a minute."""


@dataclass(frozen=True, kw_only=True)
class HubAnswer:
    """The directory that now holds config.json, or why there is none."""

    folder: Path | None = None
    why: str = ""


def ask_hub(repo_id: str, revision: str = "") -> HubAnswer:
    """Fetch config.json of a repository into the user's hub cache; offline mode and endpoint are the hub library's.

    Raises:
        UsageError: the hub has the repository, and no such revision of it.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    raised = exceptions()

    try:
        try_to_load_from_cache(repo_id, "config.json")  # refuses a malformed id before anybody is asked
        silent = _silent()
        if silent:
            return HubAnswer(why=silent)
        return HubAnswer(folder=Path(hf_hub_download(repo_id, "config.json", revision=revision or None)).parent)
    except raised.HFValidationError:
        return HubAnswer(why="it is not a hub id either")
    except raised.GatedRepoError:
        return HubAnswer(why="the hub has it behind a licence: accept it there and log in")
    except raised.RevisionNotFoundError as error:
        raise refusal(error, repo_id, revision) from error
    except raised.LocalEntryNotFoundError as error:  # also an EntryNotFoundError
        return HubAnswer(why=f"the hub did not give it: {error}")
    except raised.EntryNotFoundError:
        return HubAnswer(why="the hub has it without a config.json: an adapter, or weights in another form")
    except (raised.HfHubHTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        missing = status in (401, 404)  # the hub answers 401 for names it does not want to tell apart
        return HubAnswer(why="the hub does not know it either" if missing else f"the hub did not give it: {error}")


def _silent() -> str:
    """Why the hub cannot be reached; empty when it answers, whatever it says."""
    from huggingface_hub import constants, get_session

    raised = exceptions()

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except raised.OfflineModeIsEnabled:
        return "the hub was not asked: offline mode is on (HF_HUB_OFFLINE)"
    except Exception as error:  # the hub library has another HTTP client, with errors of its own, in each release
        return f"the hub could not be reached ({error})"
    return ""
