"""A folder that every machine of a fleet can reach: a path, `s3://bucket/prefix`, `gs://bucket/prefix`, or what else fsspec knows.

    CARD.json                 the card of a cell, named after its question
    runs/CARD--ATTEMPT.json   who answered it: one record of each run that ended
    captures/KEY/...          what references and judges computed, by the hash of everything that decides their numbers

A file is there whole or not at all: object stores write so, and a local one is written beside and renamed. Two that write the
same name write the same content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.whole_file import write_whole

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

EXTRA = "pip install 'parity-audit[store]'"
LOCAL = ("file", "local")


class StoreFailed(NotJudged):
    """The store could not be read or written: no fault of the cell that was on its way."""

    default_code = "store-failed"


@dataclass(frozen=True)
class Store:
    """`url` names the folder; its files are named relative to it."""

    url: str

    @staticmethod
    def at(place: str | Path) -> Store:
        """A store by its URL or local path, which is looked at once.

        Raises:
            UsageError: no such kind of store, or what it needs is not installed.
            StoreFailed: it cannot be reached.
        """
        text = str(place)
        store = Store(text if "://" in text else str(Path(text).absolute()))
        store.names()
        return store

    def read(self, name: str) -> bytes | None:
        """A file, or None where there is none."""
        with self._reached() as (fs, root):
            try:
                found: bytes = fs.cat_file(f"{root}/{name}")
            except FileNotFoundError:
                return None
        return found

    def write(self, name: str, data: bytes) -> None:
        """A file, whole or not at all."""
        with self._reached() as (fs, root):
            path = f"{root}/{name}"
            if fs.protocol[0] not in LOCAL:
                fs.pipe_file(path, data)
                return
            write_whole(Path(path), data)

    def names(self, folder: str = "") -> set[str]:
        """Every file below a folder, by its name relative to the folder."""
        with self._reached() as (fs, root):
            base = f"{root}/{folder}".rstrip("/")
            try:
                found = fs.find(base)
            except FileNotFoundError:
                return set()
        return {str(path).removeprefix(f"{base}/") for path in found}

    def put_folder(self, source: Path, folder: str, *, last: str) -> None:
        """Every file of a folder; `last` is written when all others are there, and says so."""
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        with self._reached() as (fs, root):
            for name in [*(name for name in names if name != last), last]:
                target = f"{root}/{folder}/{name}"
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(source / name), target)

    def get_folder(self, folder: str, target: Path) -> None:
        """Every file of a folder."""
        with self._reached() as (fs, root):
            for name in sorted(self.names(folder)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{folder}/{name}", str(target / name))

    def drop(self, name: str) -> None:
        """Delete a file or a folder; one that is not there is gone already."""
        with self._reached() as (fs, root), contextlib.suppress(FileNotFoundError):
            fs.rm(f"{root}/{name}", recursive=True)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[AbstractFileSystem, str]]:
        fs, root = self._opened()
        fs.invalidate_cache()  # s3fs holds a file that another machine wrote since the last listing for absent
        try:
            yield fs, root
        except Exception as error:
            if isinstance(error, (NotJudged, UsageError)):
                raise
            raise StoreFailed(
                f"the store cannot be used: {type(error).__name__}: {error}", where=self.url,
                hint="is it there, and may every machine of the cluster read and write it?",
            ) from error  # fmt: skip

    def _opened(self) -> tuple[AbstractFileSystem, str]:
        """The file system of the URL, and the folder in it. Raises UsageError for one that cannot be."""
        try:
            import fsspec

            fs, root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"no store at `{self.url}`: {error}", code="bad-store",
                hint=EXTRA if isinstance(error, ImportError) else "a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
            ) from error  # fmt: skip
        return fs, str(root).rstrip("/")
