"""A candidate of an audit that is prepared ahead of its turn: its engine is imported while other backends compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parity_audit.capture.session import Session
from parity_audit.core.errors import ParityError, UsageError
from parity_audit.core.types import BackendRef

ENV_MISSING = "env-missing"


@dataclass
class Side:
    """One backend of an audit, with its session or its failure.

    `make(ref, role)` finds or creates the environment; no model is loaded before the session is used. Any failure of the
    preparation is kept in `failure` and raised at this side's turn, so that it does not end the audit of the others.
    """

    ref: BackendRef
    role: str
    make: Callable[[BackendRef, str], Session]
    session: Session | None = None
    failure: Exception | None = None

    def settle(self) -> None:
        """Find or make the environment.

        Raises:
            UsageError: the BACKEND string asks for something impossible; nothing has been run yet.
            EnvFailed: its environment does not exist and may not be made.
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
        """Start the process, so that its engine is imported while other backends compute; a failure is kept, not raised."""
        if self.failure is None:
            try:
                self.settle()
                if self.session is not None:
                    self.session.prepare()
            except Exception as error:
                self.failure = error

    def ready(self) -> Session:
        """Return the prepared session, or raise the failure that `settle` or `prepare` kept."""
        if self.session is None:
            self.prepare()
        if self.failure is not None:
            raise self.failure
        assert self.session is not None
        return self.session

    def release(self) -> None:
        """End the process, if there is one."""
        if self.session is not None:
            self.session.release()
