"""List the files of a hub repository at one commit, and choose those that an audit needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parity_audit.core.errors import NotJudged
from parity_audit.specs.hub.asking import HUB_TIMEOUT
from parity_audit.specs.weight_files import INDEX, chosen

SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of config, tokenizer and chat template files; backends look for them by name, so all are fetched."""
NOT_NEEDED = ("params.json",)
"""Config in Mistral's own format: an engine that finds it looks for `consolidated` weight files, which are not fetched."""
CONVERT = {
    ".bin": "it has PyTorch pickles (.bin) only, which are not read because loading them runs code; "
    "save it once with `AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIR)` and give --weights DIR",
    ".gguf": "it has GGUF files only; give the repository that they were made from, or its weights in safetensors",
}


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a repository: its size in bytes and the hash that the hub states (SHA-256, or for small files git's SHA-1)."""

    size: int
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files of a repository at one commit, by path."""

    commit: str
    files: Mapping[str, File]


def listed(repo_id: str, revision: str) -> Listing:
    """Return the hub's listing of a repository at a revision; exceptions of the hub library are not caught."""
    from huggingface_hub import HfApi

    about = HfApi().model_info(repo_id, revision=revision or None, files_metadata=True, timeout=HUB_TIMEOUT)
    files = {
        file.rfilename: File(
            size=file.size or 0, sha256=file.lfs.sha256 if file.lfs else "",
            git_sha1="" if file.lfs else file.blob_id or "",
        )
        for file in about.siblings or ()
    }  # fmt: skip
    return Listing(commit=str(about.sha), files=files)


def needed(listing: Listing, repo_id: str) -> tuple[str, ...]:
    """Return the files that an audit needs: the small files, including the weight index, then the weights.

    Files in subdirectories are left out.

    Raises:
        NotJudged: the repository has no safetensors weights.
    """
    top = [name for name in listing.files if "/" not in name]
    small = sorted(name for name in top if name.endswith(SMALL_FILES) and name not in NOT_NEEDED)
    weights = chosen(tuple(name for name in top if name.endswith(".safetensors")), indexed=INDEX in top)
    if not weights:
        why = next((words for ending, words in CONVERT.items() if any(name.endswith(ending) for name in top)), "")
        raise NotJudged(
            f"`{repo_id}` has no safetensors weights on the hub", code="missing-weights",
            hint=why or "give a directory with config.json and *.safetensors to --weights, or use --miniature",
        )  # fmt: skip
    return (*small, *weights)
