"""Exchange JSON with an inference server over HTTP, and turn its failures into errors. Uses the standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from parity_audit.core.errors import BackendFailed

SHOWN = 300
"""Number of bytes of a server's own message that an error quotes."""


class Endpoint:
    """One server. `timeout` is the longest time in seconds that the server may stay silent during one request."""

    def __init__(self, url: str, timeout: float = 3600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def get(self, path: str) -> Any:
        """Return the server's answer to a GET request. Raises the errors of `post`."""
        return self._answer(path, None)

    def find(self, path: str) -> Any:
        """Return the server's answer to a GET request, None if the server has no such path. Raises the other errors of `post`."""
        try:
            return self._answer(path, None)
        except NotServed:
            return None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the server's answer to a POST request with a JSON body.

        Raises:
            BackendFailed: no server answers, the server refuses the request, or its answer is cut off or not JSON.
        """
        return self._answer(path, json.dumps(body).encode())

    def _answer(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            said = error.read(SHOWN).decode(errors="replace")
            kind = NotServed if error.code in (404, 405) else Refused
            raise kind(
                f"the server at {self.url} refused {path} ({error.code}): {said}", code="server-refused"
            ) from error
        except (http.client.HTTPException, ConnectionResetError) as error:
            raise BackendFailed(
                f"the answer of the server at {self.url} to {path} is cut off ({type(error).__name__})",
                code="server-answer",
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise BackendFailed(f"no server answers at {self.url}: {reason}", code="no-server") from error
        try:
            return json.loads(text) if text else {}
        except ValueError as error:
            raise BackendFailed(
                f"the answer of the server at {self.url} to {path} is cut off, or no JSON: {len(text)} bytes",
                code="server-answer",
            ) from error


class Refused(BackendFailed):
    """The server refused the request: it answered with an HTTP error status."""


class NotServed(Refused):
    """The server has no such path, or does not accept this method there (HTTP status 404 or 405)."""


def rows(reply: Any, count: int, what: str) -> list[Any]:
    """Return a reply as a list with one answer per prompt; a reply that is not a list counts as one answer.

    Raises:
        BackendFailed: the number of answers is not `count`.
    """
    found = reply if isinstance(reply, list) else [reply]
    if len(found) != count:
        raise BackendFailed(f"the server gave {len(found)} {what} for {count} prompts", code="server-answer")
    return found


def per_token(values: list[Any], count: int, what: str) -> list[Any]:
    """Return `values` unchanged if they are one value per token.

    Raises:
        BackendFailed: the number of values is not `count`, or a value is None.
    """
    if len(values) != count or any(value is None for value in values):
        given = sum(value is not None for value in values)
        raise BackendFailed(f"the server gave {given} {what} for {count} tokens", code="server-answer")
    return values
