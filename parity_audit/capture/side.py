"""A candidate of an audit, made ready ahead of its turn: engines import while others compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parity_audit.capture.session import Session
from parity_audit.core.errors import ParityError
from parity_audit.core.types import BackendRef


@dataclass
class Side:
    """`make(ref, role)` finds or creates the environment; nothing is loaded before the session is asked."""

    ref: BackendRef
    role: str
    make: Callable[[BackendRef, str], Session]
    session: Session | None = None
    failure: ParityError | None = None

    def prepare(self) -> None:
        """Make the session and start its process. What fails is kept for this side's own turn."""
        try:
            self.session = self.make(self.ref, self.role)
            self.session.prepare()
        except ParityError as error:
            self.failure = error

    def ready(self) -> Session:
        """The session. Raises what `prepare` met."""
        if self.session is None and self.failure is None:
            self.prepare()
        if self.failure is not None:
            raise self.failure
        assert self.session is not None
        return self.session

    def release(self) -> None:
        """Let the process go, if there is one."""
        if self.session is not None:
            self.session.release()
