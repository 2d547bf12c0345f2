"""The typed requests that a session sends to a running backend; each kind of worker transports them with its own `call`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from parity_audit.core.errors import ParityError
from parity_audit.core.jsonio import from_plain
from parity_audit.core.operations import OperationsReply, OperationsRequest
from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import (
    ApplyRequest,
    ConfigsReply,
    ConfigsRequest,
    LoadRequest,
    RunReply,
    RunRequest,
    WeightsRequest,
)

T = TypeVar("T")
OnProgress = Callable[..., None]


class BackendClient(ABC):
    """A backend that answers one request at a time, until it is killed."""

    @abstractmethod
    def call(self, op: str, args: Any, *, on_progress: OnProgress | None = None) -> Any:
        """Send a request and return its answer as plain data. Raises BackendFailed or WorkerDied."""

    @abstractmethod
    def prepare(self, request: LoadRequest) -> None:
        """Make the backend import its engine in the background, and return at once. An error is raised by `load` later."""

    @abstractmethod
    def kill(self) -> None:
        """End the backend and everything that it started. Safe to call twice."""

    @abstractmethod
    def _bad(self, op: str, what: str) -> ParityError:
        """Return the error for an invalid answer to a request."""

    def load(self, request: LoadRequest, on_progress: OnProgress | None = None) -> None:
        """Load a model."""
        self.call("load", request, on_progress=on_progress)

    def describe(self) -> Description:
        """Return the versions and effective settings of the loaded model."""
        return self._asked(Description, "describe", {})

    def weights(self, request: WeightsRequest) -> list[WeightPrint]:
        """Return fingerprints of live tensors."""
        return self._asked(list[WeightPrint], "weights", request)

    def run(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe."""
        return self._asked(RunReply, "run", request, on_progress)

    def replay(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe in which the values of some sites are replaced."""
        return self._asked(RunReply, "replay", request, on_progress)

    def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampleReply:
        """Draw completions."""
        return self._asked(SampleReply, "sample", request, on_progress)

    def operations(self, request: OperationsRequest, on_progress: OnProgress | None = None) -> OperationsReply:
        """Run each operation of the loaded model on rows of the operation's own input."""
        return self._asked(OperationsReply, "operations", request, on_progress)

    def score(self, request: ScoreRequest, on_progress: OnProgress | None = None) -> ScoreReply:
        """Score given completions."""
        return self._asked(ScoreReply, "score", request, on_progress)

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Return the engine's own config of released models; no model has to be loaded."""
        return self._asked(ConfigsReply, "configs", request)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Put the live model into the state with exactly these edits, and return the values read back."""
        return self._asked(list[ReadBack], "apply", request)

    def _asked(self, kind: type[T], op: str, args: Any, on_progress: OnProgress | None = None) -> T:
        answer = self.call(op, args, on_progress=on_progress)
        try:
            return from_plain(kind, answer)
        except (TypeError, ValueError) as error:
            raise self._bad(op, f"answered what is no {kind.__name__}: {error}") from error
