"""Download a checkpoint into the user's hub cache: only the files that an audit reads, checked against the hub's hashes.

An interrupted download continues where it stopped. Files are fetched one after another in the calling thread, so that Ctrl-C ends
the download at once; the hub library fetches the parts of a large file in parallel where it can.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parity_audit.core.errors import NotJudged, ParityError
from parity_audit.core.progress import Progress
from parity_audit.specs.hub.cached import cached_repository, hub_cache
from parity_audit.specs.hub.listing import File, Listing, listed, needed
from parity_audit.specs.hub.refusals import refusal

STAGE = "download"
LOOK_EVERY = 0.5
"""Seconds between two updates of the number of bytes that have arrived."""
CHUNK_BYTES = 1 << 24
GB = 1e9


def download(repo_id: str, revision: str, progress: Progress, *, beside: str = "") -> Path:
    """Return the snapshot directory with all files that an audit needs, after downloading those that are not in the cache.

    Args:
        revision: branch, tag or commit; "" for the main branch.
        beside: text to append to the hint of an error.

    Raises:
        UsageError: the revision does not exist.
        NotJudged: the repository does not exist, has no safetensors weights, or may not be read by this account; the hub cannot be
            reached or the transfer breaks off; the branch moved during the download; there is too little disk space; or a file
            does not have the hash that the hub states.
    """
    progress.update(STAGE, f"asking the hub for {repo_id}")
    try:
        listing = listed(repo_id, revision)
        names = needed(listing, repo_id)
        _require_room(listing, names, repo_id)
        with _quiet_library(), _counted(repo_id, sum(listing.files[name].size for name in names), progress):
            paths = [_fetch(repo_id, name, revision) for name in names]
    except ParityError:
        raise
    except Exception as error:  # releases of the hub library differ in HTTP client and exceptions
        raise refusal(error, repo_id, revision, beside=beside) from error
    folder = paths[0].parent
    if folder.name != listing.commit:
        raise NotJudged(
            f"`{repo_id}` changed on the hub while it was being fetched", code="hub-unreachable",
            hint=f"run the same command again, or name a commit: {repo_id}@{listing.commit}",
        )  # fmt: skip
    for path in paths:
        progress.update(STAGE, f"checking {path.name}")
        _require_hash(path, listing.files[path.name])
    return folder


def _fetch(repo_id: str, name: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id, name, revision=revision or None))


def _require_room(listing: Listing, names: tuple[str, ...], repo_id: str) -> None:
    """Check, before anything is downloaded, that the disk has room for the files minus what is in the cache already.

    Raises:
        NotJudged: there is too little disk space.
    """
    home = hub_cache()
    there = next(path for path in (home, *home.absolute().parents) if path.exists())
    wanted = sum(listing.files[name].size for name in names) - _arrived(repo_id)
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise NotJudged(
            f"`{repo_id}` needs {wanted / GB:.1f} GB, and there are {free / GB:.1f} GB", code="disk", where=str(there),
            hint="make room, or set HF_HOME to a larger disk",
        )  # fmt: skip


def _require_hash(path: Path, stated: File) -> None:
    """Check a file against the hash that the hub states; a file with another hash is deleted, so that no later run uses it.

    A file for which the hub states no hash is not checked.

    Raises:
        NotJudged: the file has another hash.
    """
    if not stated.sha256 and not stated.git_sha1:
        return
    digest = hashlib.sha256() if stated.sha256 else hashlib.sha1(usedforsecurity=False)
    if not stated.sha256:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != (stated.sha256 or stated.git_sha1):
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise NotJudged(
            f"{path.name} arrived with other contents than the hub states", code="bad-download", where=str(path),
            expected=stated.sha256 or stated.git_sha1, found=digest.hexdigest(),
            hint="it was taken out of the cache: run the same command again",
        )  # fmt: skip


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Disable the hub library's progress bars inside the block: they would overwrite those of this program."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def _counted(repo_id: str, total: int, progress: Progress) -> Iterator[None]:
    """Report during the block how much has arrived.

    This is measured by the size of the files in the cache, which works whichever way the hub library downloads.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY):
            progress.update(STAGE, f"{repo_id}: {_arrived(repo_id) / GB:.2f} of {total / GB:.2f} GB")

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _arrived(repo_id: str) -> int:
    """Return the number of bytes of a model in the cache, including unfinished files."""
    sizes = 0
    for path in (cached_repository(repo_id) / "blobs").glob("*"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # an unfinished file was renamed just now
            continue
    return sizes
