"""The resolved question, the workspace and the options, which every stage of one audit shares."""

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
    """The resolved question, the place to work, and what the user allows.

    `timeout` is in seconds, for each request to a worker. `limits`: measure the smallest errors that the run can detect.
    `scratch` is the bound on disk space that `--disk` sets. `quick`: only the verdict and its causes, on few tokens, without
    repair, without detection limits, and without the runs that check the reference against itself.
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
        """Return a session for one side. Its environment exists or is made here, but no process is started yet."""
        if self.tf32:
            ref = dataclasses.replace(ref, settings={**ref.settings, "tf32": True})
        plan = side_plan(self.plan, ref, install=self.install, progress=self.progress)
        decodes = role not in ("reference", "judge")
        # Engines load a model by name, and would load a folder of that name in the working directory instead. So they run in
        # an empty directory. The user's own port runs in the user's directory.
        home = None if ref.target else self.workspace.home()
        return Session(
            plan=plan, log=self.workspace.log(f"{role}-{ref}"), decodes=decodes, timeout=self.timeout,
            progress=self.progress, home=home, scratch=self.scratch,
        )  # fmt: skip

    def right_references(self) -> RightReferences:
        """Return the object that makes replacements for a reference that departs from the spec; nothing is run yet."""
        keep = self.workspace.keeps_loaded(self.plan.checkpoint)
        return RightReferences(
            make=lambda ref: self.session(ref, "reference"), folder=self.workspace.captures, keep=keep
        )  # fmt: skip
