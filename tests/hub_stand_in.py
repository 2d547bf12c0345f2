"""A server that speaks the hub's protocol as far as its library asks: listing with hashes, files with ranges, and its errors.

What goes wrong is set on the `Repository`: nothing here knows what the program under test will make of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from parity_audit.core.errors import ParityError
from parity_audit.specs.checkpoints import find_checkpoint
from parity_audit.specs.resolve import resolve_model

COMMIT = "c" * 40
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["parity_audit.specs.checkpoints", "parity_audit.specs.resolve"])
"""The hub library reads its settings when it is imported: every question is a process, made from one that has all else."""
LARGE = (".safetensors", ".model")
"""Files that the hub keeps in its large-file store: listed with their SHA-256, and the ETag is that hash."""
PIECE = 1 << 14


@dataclass
class Repository:
    """One model: `files` by path, and what shall go wrong with it.

    `refused` is an HTTP status and the hub's error code for everything; `cut_after` the bytes of a large file after which
    the connection breaks, `cuts` how often; `altered` a file whose last byte is sent changed; `pause` the seconds before
    each piece of a large file.
    """

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    refused: tuple[int, str] | None = None
    cut_after: int = 0
    cuts: int = 0
    altered: str = ""
    pause: float = 0.0
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


def repository(folder: Path, **beside: bytes) -> Repository:
    """Everything of a checkpoint directory."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return Repository(files={**files, **beside})


class _Hub(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if not path:
            return self.give(200, b"hub")
        api = path.startswith("api/models/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        found = self.repositories.get(name)
        if found is None:
            return self.refuse(404, "RepoNotFound")
        found.asked.append((self.command, path, self.headers.get("Range", "")))
        if found.refused:
            return self.refuse(*found.refused)
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/").split("/", 2)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = found.revisions.get(revision, revision if revision in found.revisions.values() else "")
        if not commit:
            return self.refuse(404, "RevisionNotFound")
        if api:
            return self.give(200, json.dumps(_listing(name, commit, found)).encode())
        self.file(found, rest[2], commit)
        return None

    def file(self, found: Repository, name: str, commit: str) -> None:
        data = found.files.get(name)
        if data is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{_etag(name, data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name == found.altered:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.give(206 if wanted else 200, data[start:], headers, found if name.endswith(LARGE) else None)

    def refuse(self, status: int, code: str) -> None:
        self.give(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def give(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, found: Repository | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = bool(found and found.cut_after and found.cuts > 0 and len(data) > found.cut_after)
        if found and cut:
            found.cuts -= 1
            data = data[: found.cut_after]
        for place in range(0, len(data), PIECE):
            time.sleep(found.pause if found else 0)
            self.wfile.write(data[place : place + PIECE])
        if cut:
            self.close_connection = True
            self.connection.close()

    def log_message(self, *_: object) -> None:
        pass


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else _git_sha1(data)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _listing(name: str, commit: str, found: Repository) -> dict[str, object]:
    siblings = []
    for path, data in found.files.items():
        about: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": _git_sha1(data)}
        if path.endswith(LARGE):
            about["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        siblings.append(about)
    return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "gated": False}


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[str]:
    """The address of a hub that has these models."""

    class Hub(_Hub):
        pass

    Hub.repositories = repositories
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        self.lines.append(f"{stage}: {text}")


def found(model: str, homes: Path) -> tuple[dict[str, Any], list[str]]:
    """What `find_checkpoint` gives or raises here, and the progress that it told."""
    said = _Said()
    try:
        checkpoint = find_checkpoint(resolve_model(model), None, homes=homes, progress=said)
    except ParityError as error:
        return {**error.to_json(), "exit": error.exit_code}, said.lines
    keys = ("path", "revision", "hf_home", "by_name")
    return {key: getattr(checkpoint, key) for key in keys}, said.lines


def loaded_commit(model: str) -> str:
    """The commit whose config.json a load by name gets."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json")).parent.name


def _answer(
    pipe: Any, environ: dict[str, str], limit: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environ)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with contextlib.closing(pipe):
        pipe.send(function(*args))


def start(environ: dict[str, str], function: Callable[..., Any], *args: Any, limit: int = 0) -> tuple[Any, Any]:
    """A process with these settings, and the end of the pipe that its answer comes out of; `limit`: bytes of a file."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_answer, args=(there, environ, limit, function, args), daemon=True)
    process.start()
    there.close()
    return process, here


def find(environ: dict[str, str], homes: Path, model: str, limit: int = 0) -> tuple[dict[str, Any], list[str]]:
    """The same in a process with these settings."""
    return asked(environ, found, model, homes, limit=limit)


def asked(environ: dict[str, str], function: Callable[..., Any], *args: Any, limit: int = 0) -> Any:
    """The answer of a function in a process with these settings."""
    process, pipe = start(environ, function, *args, limit=limit)
    answer = pipe.recv()
    process.join()
    return answer
