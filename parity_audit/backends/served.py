"""An engine behind HTTP: a server that the user runs at `url`, which gives completions and log-probabilities only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn

from parity_audit.backends.base import Tell
from parity_audit.backends.endpoint import Endpoint
from parity_audit.backends.sglang_http import SglangHttp
from parity_audit.backends.vllm_http import VllmHttp
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.types import Checkpoint, Description, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

URL, ENGINE = "url", "engine"
Server = SglangHttp | VllmHttp


class ServedBackend:
    """Draws and scores completions on a running server, whose activations and weights can be neither read nor edited."""

    request: LoadRequest
    server: Server

    def prepare(self, request: LoadRequest) -> None:
        """Do nothing: there is no engine to import."""

    def load(self, request: LoadRequest) -> None:
        """Find out which engine answers at the URL, and check that it serves the wanted model.

        Raises:
            BackendFailed: no server answers, the server is neither vLLM nor SGLang, it is not the engine that the
                setting `engine` names, or it serves another model.
            ValueError: other settings than `url` and `engine` are given; a server's settings are fixed when it starts.
        """
        unknown = sorted(request.settings.keys() - {URL, ENGINE})
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: the settings of a server are those it was started with")
        self.request = request
        self.server = recognised(Endpoint(str(request.settings[URL])), request)
        wanted = request.settings.get(ENGINE, self.server.kind)
        if wanted != self.server.kind:
            raise BackendFailed(f"the server is {self.server.kind}'s, and --engine says {wanted}", code="server-model")
        require_model(self.server.model, request.checkpoint)

    def describe(self) -> Description:
        """Return the server's engine, version, model and settings, as the server reports them."""
        settings = {**self.request.settings, **self.server.settings(), "model": self.server.model}
        return Description(
            backend=self.server.kind, package=self.server.package, version=self.server.version, settings=settings
        )

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Draw completions (the decode leg)."""
        return self.server.sample(request)

    def score(self, request: ScoreRequest, tell: Tell) -> ScoreReply:
        """Return prompt log-probabilities of given tokens (the prefill leg).

        Raises:
            ValueError: a temperature other than 1, or truncation, was asked for. Prompt log-probabilities are always
                those of temperature 1 over the whole vocabulary.
        """
        if request.temperatures != (1.0,) or request.truncation is not None:
            raise ValueError("prompt log-probabilities are those of temperature 1 over the whole vocabulary")
        return self.server.score(request)

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Raise NotImplementedError: a server does not show its weights."""
        self._only_rollouts()

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Raise NotImplementedError: a server does not show its activations."""
        self._only_rollouts()

    replay = run

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Return an empty list for a request without edits, since there is never an edit to undo.

        Raises:
            NotImplementedError: the request has edits.
        """
        return self._only_rollouts() if request.edits else []

    def _only_rollouts(self) -> NoReturn:
        raise NotImplementedError("a server gives completions and log-probabilities, and nothing else")


def recognised(endpoint: Endpoint, request: LoadRequest) -> Server:
    """Return the client for the server at an endpoint.

    Raises:
        BackendFailed: no server answers, or it is neither vLLM nor SGLang.
    """
    found: Any = SglangHttp.recognised(endpoint) or VllmHttp.recognised(endpoint)
    if isinstance(found, SglangHttp):
        found.vocabulary = request.sizes.get("d_vocab")
    if found is None:
        raise BackendFailed(f"what answers at {endpoint.url} is no server of vLLM or SGLang", code="no-server")
    server: Server = found
    return server


def require_model(served: str, checkpoint: Checkpoint) -> None:
    """Check that the server's model is `checkpoint`, by its name, its directory or its place in a hub cache.

    Raises:
        BackendFailed: the server serves another model.
    """
    in_cache = f"models--{checkpoint.repo_id.replace('/', '--')}"
    same = (
        served.casefold() == checkpoint.repo_id.casefold()
        or os.path.realpath(served) == os.path.realpath(checkpoint.path)
        or in_cache.casefold() in served.casefold().split("/")
    )
    if not same:
        raise BackendFailed(
            f"the server serves `{served}`, and the question is about `{checkpoint.repo_id}`", code="server-model"
        )
