"""What every stage of one audit shares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from parity_audit.audit.right_reference import RightReferences
from parity_audit.capture.plan import AuditPlan, side_plan
from parity_audit.capture.scratch import Scratch
from parity_audit.capture.session import Session
from parity_audit.capture.workspace import Workspace
from parity_audit.core.progress import Progress
from parity_audit.core.types import BackendRef


@dataclass(frozen=True, kw_only=True)
class AuditContext:
    """The question, resolved; the place to work; and what the user allows.

    `timeout`: seconds for each request to a worker; `limits`: measure the smallest errors that the run can see; `scratch`: the
    bound of `--disk`; `quick`: the verdict and its causes on few tokens, without repair, limits, and runs that hold the
    reference against itself.
    """

    plan: AuditPlan
    workspace: Workspace
    install: bool
    tf32: bool
    target: float
    repair: bool
    hooks: bool
    timeout: float
    progress: Progress
    match_reference: bool = False
    limits: bool = True
    quick: bool = False
    scratch: Scratch | None = None

    def session(self, ref: BackendRef, role: str) -> Session:
        """A session for one side; nothing is started yet, but its environment is there."""
        if self.tf32:
            ref = dataclasses.replace(ref, settings={**ref.settings, "tf32": True})
        plan = side_plan(self.plan, ref, install=self.install, progress=self.progress)
        decodes = role not in ("reference", "judge")
        # Engines load by name, and a folder of that name in the working directory would come first. A port is the user's.
        home = None if ref.target else self.workspace.home()
        return Session(
            plan=plan, log=self.workspace.log(f"{role}-{ref}"), decodes=decodes, timeout=self.timeout,
            progress=self.progress, home=home, scratch=self.scratch,
        )  # fmt: skip

    def right_references(self) -> RightReferences:
        """What takes the place of a reference that departs from the spec; nothing is run yet."""
        keep = self.workspace.keeps_loaded(self.plan.checkpoint)
        return RightReferences(
            make=lambda ref: self.session(ref, "reference"), folder=self.workspace.captures, keep=keep
        )  # fmt: skip
