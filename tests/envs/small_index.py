"""A package index on this machine's loopback: hand-made wheels, each with the day on which it was uploaded (or without)."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


def metadata(name: str, version: str, requires: Sequence[str]) -> str:
    """What a package says of itself."""
    needs = "".join(f"Requires-Dist: {item}\n" for item in requires)
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"


def wheel(name: str, version: str, requires: Sequence[str] = ()) -> tuple[str, bytes]:
    """File name and content of an empty package with these requirements."""
    stem, stream = f"{name.replace('-', '_')}-{version}", io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"{name.replace('-', '_')}.py", f"version = {version!r}\n")
        archive.writestr(f"{stem}.dist-info/METADATA", metadata(name, version, requires))
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-py3-none-any.whl", stream.getvalue()


class SmallIndex:
    """What the index serves: files by package, and where it listens."""

    def __init__(self) -> None:
        self.files: dict[str, list[dict[str, object]]] = {}
        self.bodies: dict[str, bytes] = {}
        self.url = ""
        self.asked: list[str] = []

    def add(self, name: str, version: str, uploaded: str | None, *, requires: Sequence[str] = ()) -> None:
        """One release; `uploaded` is a day, None where the index does not say."""
        file, body = wheel(name, version, requires)
        entry: dict[str, object] = {"filename": file, "url": f"/files/{file}", "hashes": {"sha256": _sha256(body)}}
        entry["core-metadata"] = True
        if uploaded is not None:
            entry["upload-time"] = f"{uploaded}T12:00:00.000000Z"
        self.files.setdefault(name, []).append(entry)
        self.bodies[file] = body
        self.bodies[f"{file}.metadata"] = metadata(name, version, requires).encode()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Content type and body of a path; None where there is nothing."""
        self.asked.append(path)
        kind, _, name = path.strip("/").partition("/")
        if kind == "files" and name in self.bodies:
            return "application/zip", self.bodies[name]
        if kind == "simple" and name in self.files:
            page = {"meta": {"api-version": "1.1"}, "name": name, "files": self.files[name], "versions": []}
            return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()
        return None


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@contextmanager
def serving(index: SmallIndex) -> Iterator[SmallIndex]:
    """The index, listening until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = index.answer(self.path)
            self.send_response(200 if found else 404)
            kind, body = found or ("text/plain", b"")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()


def wheel_at_hand(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> None:
    """A wheel in a folder that UV_FIND_LINKS may name."""
    file, body = wheel(name, version, requires)
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(body)
