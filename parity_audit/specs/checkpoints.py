"""Real weights: found in a directory or the hub cache, or fetched by the hub library; checked before any engine starts."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from safetensors import safe_open

from parity_audit.core.errors import NotJudged
from parity_audit.core.types import Checkpoint
from parity_audit.specs.resolve import ResolvedModel, cached_snapshot


def find_checkpoint(model: ResolvedModel, weights: Path | None) -> Checkpoint:
    """The checkpoint of a model, downloaded if the hub can be reached.

    Raises:
        NotJudged: no weights here and no way to fetch them, or a safetensors file is truncated.
    """
    given = weights or (Path(model.repo_id) if model.local else None)
    folder = given or cached_snapshot(model.repo_id) or _download(model.repo_id)
    files = sorted(folder.glob("*.safetensors"))
    if not files and given is None:
        folder = _download(model.repo_id)
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotJudged(
            "no safetensors weights", code="missing-weights", where=str(folder),
            hint="give a directory with config.json and *.safetensors to --weights, or use --miniature",
        )  # fmt: skip
    for file in files:
        check_safetensors(file)
    return Checkpoint(
        repo_id=model.repo_id, path=str(folder.resolve()), by_name=given is None, fingerprint=_fingerprint(files)
    )


def check_safetensors(path: Path) -> None:
    """Compare the header's promise with the file's size: a download that broke off is found in no time.

    Raises:
        NotJudged: truncated or not a safetensors file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (struct.error, ValueError, KeyError, OSError) as error:
        raise NotJudged(
            f"{path.name} is not a safetensors file: {error}", code="bad-weights", where=str(path)
        ) from error
    if size != expected:
        raise NotJudged(
            f"{path.name} is truncated" if size < expected else f"{path.name} has bytes its header does not know",
            code="bad-weights", where=str(path), expected=f"{expected} bytes", found=f"{size} bytes",
            hint="fetch the file again",
        )  # fmt: skip


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise NotJudged(
            f"no weights of `{repo_id}` here, and the hub did not give them: {type(error).__name__}",
            code="missing-weights",
            hint="accept the licence and log in to the hub, give --weights DIR, or run `--miniature` (needs no download)"
            + _beside(repo_id),
        ) from error  # fmt: skip


def _beside(repo_id: str) -> str:
    """Where the working directory has a checkpoint of that name: how to say that it is meant."""
    near = next((name for name in (repo_id, repo_id.rpartition("/")[2]) if Path(name, "config.json").is_file()), None)
    return f"; for the directory here, write `./{near}`" if near else ""


def _fingerprint(files: list[Path]) -> str:
    """Name, size and header of every file: cheap even for many gigabytes; parameters are hashed one by one later."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            digest.update(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode() + stream.read(length))
    return digest.hexdigest()[:16]


def stored_names(folder: Path) -> tuple[str, ...]:
    """Names of all tensors in the safetensors files of a checkpoint."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names += handle.keys()
    return tuple(names)
