"""A candidate of an audit, made ready ahead of its turn: engines import while others compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parity_audit.capture.session import Session
from parity_audit.core.errors import ParityError, UsageError
from parity_audit.core.types import BackendRef

ENV_MISSING = "env-missing"


@dataclass
class Side:
    """`make(ref, role)` finds or creates the environment; nothing is loaded before the session is asked.

    What fails, in whatever way, is this side's own failure: it is kept for its turn.
    """

    ref: BackendRef
    role: str
    make: Callable[[BackendRef, str], Session]
    session: Session | None = None
    failure: Exception | None = None

    def settle(self) -> None:
        """Find or make the environment.

        Raises:
            UsageError: the BACKEND string asks for what cannot be; nothing has been run yet.
            EnvFailed: its environment is not there, and may not be made.
        """
        if self.session is not None or self.failure is not None:
            return
        try:
            self.session = self.make(self.ref, self.role)
        except ParityError as error:
            if isinstance(error, UsageError) or error.code == ENV_MISSING:
                raise
            self.failure = error

    def prepare(self) -> None:
        """Start the process, so that its engine is imported while others compute."""
        if self.failure is None:
            try:
                self.settle()
                if self.session is not None:
                    self.session.prepare()
            except Exception as error:
                self.failure = error

    def ready(self) -> Session:
        """The session. Raises what `settle` or `prepare` met."""
        if self.session is None:
            self.prepare()
        if self.failure is not None:
            raise self.failure
        assert self.session is not None
        return self.session

    def release(self) -> None:
        """Let the process go, if there is one."""
        if self.session is not None:
            self.session.release()
