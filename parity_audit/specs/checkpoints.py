"""Find the real weights of a model in a directory or the hub cache, or download them; check them before any engine starts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.text_names import text_names
from parity_audit.core.types import Checkpoint
from parity_audit.specs.hub.cached import cached_snapshot, commit_of
from parity_audit.specs.hub.download import download
from parity_audit.specs.hub.home import pinned_home
from parity_audit.specs.hub.listing import CONVERT
from parity_audit.specs.other_forms import require_plain_weights
from parity_audit.specs.resolve import ResolvedModel, read_config
from parity_audit.specs.safetensors_header import check_finite, stored_tensors
from parity_audit.specs.weight_files import all_there, shards_of, weight_files

TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "tekken.json")
"""Glob patterns of the files that tokenizers are saved in."""


def find_checkpoint(
    model: ResolvedModel, weights: Path | None, *, homes: Path, progress: Progress = SILENT
) -> Checkpoint:
    """Return the checkpoint of a model. If it is not on this machine, download it; an interrupted download is completed.

    Args:
        weights: a directory with the weights; None for the model's own directory or the hub.
        homes: the directory for the private hub caches from which workers load a model of the hub (`pinned_home`).

    Raises:
        NotJudged: there are no weights here and they cannot be downloaded, they are quantised, or a file is damaged
            (see `check_weights`).
        UsageError: the hub has no such revision.
    """
    given = weights or (Path(model.repo_id) if model.local else None)
    folder = given or _of_the_hub(model, progress)
    require_plain_weights(read_config(folder), folder)
    files = weight_files(folder)
    if not files:
        raise NotJudged(
            "no safetensors weights", code="missing-weights", where=str(folder),
            hint=_instead(folder) or "give a directory with config.json and *.safetensors to --weights, or use --miniature",
        )  # fmt: skip
    check_weights(folder, files)
    return Checkpoint(
        repo_id=model.repo_id, path=str(folder.resolve()), by_name=given is None, fingerprint=_fingerprint(files),
        revision="" if given else commit_of(folder),
        hf_home=None if given else str(pinned_home(model.repo_id, folder, homes)),
    )  # fmt: skip


def _of_the_hub(model: ResolvedModel, progress: Progress) -> Path:
    """Return the snapshot in the user's hub cache if it is complete, else a downloaded one.

    If the download fails and the cached snapshot lacks only its tokenizer, return the cached one and report that.
    """
    cached = cached_snapshot(model.repo_id, model.revision)
    if cached is not None and all_there(cached) and _has_tokenizer(cached):
        return cached
    try:
        return download(model.repo_id, model.revision, progress, beside=_beside(model.repo_id))
    except NotJudged as error:
        if cached is None or not all_there(cached):
            raise
        progress.update("download", f"the cached copy of {model.repo_id} has no tokenizer, and {error.message}")
        return cached


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(name), None) is not None for name in TOKENIZERS)


def _instead(folder: Path) -> str:
    """Return a hint on how to convert the weights if the folder has them in a format that is not read; else an empty string."""
    return next((words for ending, words in CONVERT.items() if next(folder.glob(f"*{ending}"), None)), "")


def check_weights(folder: Path, files: Sequence[Path]) -> None:
    """Check the headers, the index and all numbers of a checkpoint before any engine starts.

    Raises:
        NotJudged: a file is damaged or missing, a tensor is in two files, or a tensor holds NaN or infinity.
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
    for name, shard in shards_of(folder).items():
        if name not in owner:
            raise NotJudged(
                f"the index places {name} in {shard}, which is not there or does not hold it", code="missing-tensors",
                where=str(folder), hint="get the checkpoint again",
            )  # fmt: skip
    for file in files:
        check_finite(file)


def _beside(repo_id: str) -> str:
    """Return how to name the directory instead, if the working directory has a checkpoint of this name; else an empty string."""
    near = next((name for name in (repo_id, repo_id.rpartition("/")[2]) if Path(name, "config.json").is_file()), None)
    return f"; for the directory here, write `./{near}`" if near else ""


def _fingerprint(files: Sequence[Path]) -> str:
    """Return a hash of the name, size, modification time and header of every file.

    The tensors are not read, so this is fast even for many gigabytes; parameters are hashed one by one later.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            digest.update(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode() + stream.read(length))
    return digest.hexdigest()[:16]


def stored_names(folder: Path) -> tuple[str, ...]:
    """Return the names of all tensors in a checkpoint's safetensors files; for a multimodal model, only those of its text model."""
    return tuple(text_names(tensor.name for file in weight_files(folder) for tensor in stored_tensors(file)))
