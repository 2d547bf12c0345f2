"""Real weights: found in a directory or the hub cache, or fetched by the hub library; checked before any engine starts."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.core.types import Checkpoint
from parity_audit.specs.resolve import ResolvedModel, cached_snapshot
from parity_audit.specs.safetensors_header import check_finite, stored_tensors


def find_checkpoint(model: ResolvedModel, weights: Path | None) -> Checkpoint:
    """The checkpoint of a model, downloaded if the hub can be reached.

    Raises:
        NotJudged: no weights here and no way to fetch them, or a file is damaged; see `check_weights`.
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
    check_weights(folder, files)
    return Checkpoint(
        repo_id=model.repo_id, path=str(folder.resolve()), by_name=given is None, fingerprint=_fingerprint(files)
    )


def check_weights(folder: Path, files: list[Path]) -> None:
    """Headers, the index and the numbers of a checkpoint, before any engine starts.

    Raises:
        NotJudged: a file is damaged, missing, holds NaN, or the same tensor as another.
    """
    owner: dict[str, Path] = {}
    for file in files:
        for tensor in stored_tensors(file):
            if tensor.name in owner:
                raise NotJudged(
                    f"{tensor.name} is in {owner[tensor.name].name} and in {file.name}", code="bad-weights",
                    where=str(folder), hint="files of two checkpoints in one directory?",
                )  # fmt: skip
            owner[tensor.name] = file
    for name, shard in _indexed(folder).items():
        if name not in owner:
            raise NotJudged(
                f"the index places {name} in {shard}, which is not there or does not hold it", code="missing-tensors",
                where=str(folder), hint="get the checkpoint again",
            )  # fmt: skip
    for file in files:
        check_finite(file)


def _indexed(folder: Path) -> dict[str, str]:
    """Which file holds which tensor, where an index says so."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NotJudged(f"{path.name} cannot be read: {error}", code="bad-weights", where=str(path)) from error


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
    return tuple(tensor.name for file in sorted(folder.glob("*.safetensors")) for tensor in stored_tensors(file))
