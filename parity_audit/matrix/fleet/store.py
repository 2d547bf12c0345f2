"""A folder that all machines of a fleet can reach: a path, `s3://bucket/prefix`, `gs://bucket/prefix` or another URL of fsspec.

    CARD.json                 the card of a cell, named after its question
    runs/CARD--ATTEMPT.json   a record of each task that ended: which machine ran it, when, and for how long
    captures/KEY/...          captures of references and judges; KEY is a hash of everything that determines their numbers

`write` makes a file appear complete or not at all: object stores do this themselves, and a local file is written under another
name and then renamed. `put_folder` writes a marker file last. Machines that write the same name write the same content.
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
    """The store could not be read or written, which says nothing about the cell that was being run."""

    default_code = "store-failed"


@dataclass(frozen=True)
class Store:
    """A folder with the URL or path `url`; its files are named relative to it."""

    url: str

    @staticmethod
    def at(place: str | Path) -> Store:
        """Return the store at a URL or local path, after listing it once to check that it can be reached.

        Raises:
            UsageError: this kind of store is unknown, or the package for it is not installed.
            StoreFailed: the store cannot be reached.
        """
        text = str(place)
        store = Store(text if "://" in text else str(Path(text).absolute()))
        store.names()
        return store

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        with self._reached() as (fs, root):
            try:
                found: bytes = fs.cat_file(f"{root}/{name}")
            except FileNotFoundError:
                return None
        return found

    def write(self, name: str, data: bytes) -> None:
        """Write a file so that readers see either the whole file or none."""
        with self._reached() as (fs, root):
            path = f"{root}/{name}"
            if fs.protocol[0] not in LOCAL:
                fs.pipe_file(path, data)
                return
            write_whole(Path(path), data)

    def names(self, folder: str = "") -> set[str]:
        """Return the names of all files below a folder, relative to it; an empty set if the folder does not exist."""
        with self._reached() as (fs, root):
            base = f"{root}/{folder}".rstrip("/")
            try:
                found = fs.find(base)
            except FileNotFoundError:
                return set()
        return {str(path).removeprefix(f"{base}/") for path in found}

    def put_folder(self, source: Path, folder: str, *, last: str) -> None:
        """Copy all files below `source` to a folder; the file `last` is copied last, so its presence shows that all are there."""
        names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        with self._reached() as (fs, root):
            for name in [*(name for name in names if name != last), last]:
                target = f"{root}/{folder}/{name}"
                fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(source / name), target)

    def get_folder(self, folder: str, target: Path) -> None:
        """Copy all files below a folder of the store to the local folder `target`."""
        with self._reached() as (fs, root):
            for name in sorted(self.names(folder)):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{root}/{folder}/{name}", str(target / name))

    def drop(self, name: str) -> None:
        """Delete a file or a folder; it is no error if it does not exist."""
        with self._reached() as (fs, root), contextlib.suppress(FileNotFoundError):
            fs.rm(f"{root}/{name}", recursive=True)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[AbstractFileSystem, str]]:
        fs, root = self._opened()
        fs.invalidate_cache()  # s3fs's cache lacks files that another machine wrote since the last listing
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
        """Return the file system of the URL and the folder in it.

        Raises:
            UsageError: this kind of store is unknown, or the package for it is not installed.
        """
        try:
            import fsspec

            fs, root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"no store at `{self.url}`: {error}", code="bad-store",
                hint=EXTRA if isinstance(error, ImportError) else "a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
            ) from error  # fmt: skip
        return fs, str(root).rstrip("/")
