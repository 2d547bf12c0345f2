"""The questions that a session asks of a running backend, typed; how they reach it is each worker's own `call`."""

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


class Asking(ABC):
    """A backend that answers one question at a time, until it is killed."""

    @abstractmethod
    def call(self, op: str, args: Any, *, on_progress: OnProgress | None = None) -> Any:
        """Ask and wait; the answer is plain data. Raises BackendFailed or WorkerDied."""

    @abstractmethod
    def prepare(self, request: LoadRequest) -> None:
        """Let it import its engine meanwhile; returns at once. What goes wrong, `load` will say."""

    @abstractmethod
    def kill(self) -> None:
        """Let it go, with all that it started. Safe to call twice."""

    @abstractmethod
    def _bad(self, op: str, what: str) -> ParityError:
        """The error of an answer that is none."""

    def load(self, request: LoadRequest, on_progress: OnProgress | None = None) -> None:
        """Load a model."""
        self.call("load", request, on_progress=on_progress)

    def describe(self) -> Description:
        """Versions and effective settings of the loaded model."""
        return self._asked(Description, "describe", {})

    def weights(self, request: WeightsRequest) -> list[WeightPrint]:
        """Fingerprints of live tensors."""
        return self._asked(list[WeightPrint], "weights", request)

    def run(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe."""
        return self._asked(RunReply, "run", request, on_progress)

    def replay(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe with sites replaced."""
        return self._asked(RunReply, "replay", request, on_progress)

    def sample(self, request: SampleRequest, on_progress: OnProgress | None = None) -> SampleReply:
        """Draw completions."""
        return self._asked(SampleReply, "sample", request, on_progress)

    def operations(self, request: OperationsRequest, on_progress: OnProgress | None = None) -> OperationsReply:
        """Run each operation of the loaded model on rows of its own input."""
        return self._asked(OperationsReply, "operations", request, on_progress)

    def score(self, request: ScoreRequest, on_progress: OnProgress | None = None) -> ScoreReply:
        """Score given completions."""
        return self._asked(ScoreReply, "score", request, on_progress)

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """The engine's own config of released models; nothing has to be loaded."""
        return self._asked(ConfigsReply, "configs", request)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Bring the live model to exactly these edits."""
        return self._asked(list[ReadBack], "apply", request)

    def _asked(self, kind: type[T], op: str, args: Any, on_progress: OnProgress | None = None) -> T:
        answer = self.call(op, args, on_progress=on_progress)
        try:
            return from_plain(kind, answer)
        except (TypeError, ValueError) as error:
            raise self._bad(op, f"answered what is no {kind.__name__}: {error}") from error
