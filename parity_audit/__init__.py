"""Audit ports of language models: find out whether a port computes the same function as its reference, and why not.

Importing this package loads only the version. Every public name is imported from its module on first use, so that
`parity_audit.core` can also be imported on the bare interpreter of a backend's own environment.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parity_audit.core.version import __version__

_PLACES = {
    "batch_invariant.context": ("invariant",),
    "api": ("audit", "audit_live", "capture", "diff", "invariance", "logprobs"),
    "core.invariance_report": ("InvarianceReport",),
    "core.logprob_report": ("LogprobReport",),
    "core.rollouts": ("Sampling",),
    "report.frame": ("findings_frame",),
    "core.report": (
        "Candidate", "DetectionLimit", "Finding", "HookEdit", "LogitsDelta", "Patch", "Patched", "Proof", "Report", "Side",
        "SiteDelta", "Verdict",
    ),
    "core.types": ("BackendRef", "NotTested", "NotVisible"),
    "core.errors": (
        "BackendFailed", "CannotRun", "CaptureBroken", "EnvFailed", "NotJudged", "ParityError", "SpecError", "UsageError",
        "WorkerDied",
    ),
}  # fmt: skip
_HOMES = {name: home for home, names in _PLACES.items() for name in names}

__all__ = [
    "BackendFailed",
    "BackendRef",
    "Candidate",
    "CannotRun",
    "CaptureBroken",
    "DetectionLimit",
    "EnvFailed",
    "Finding",
    "HookEdit",
    "InvarianceReport",
    "LogitsDelta",
    "LogprobReport",
    "NotJudged",
    "NotTested",
    "NotVisible",
    "ParityError",
    "Patch",
    "Patched",
    "Proof",
    "Report",
    "Sampling",
    "Side",
    "SiteDelta",
    "SpecError",
    "UsageError",
    "Verdict",
    "WorkerDied",
    "__version__",
    "audit",
    "audit_live",
    "capture",
    "diff",
    "findings_frame",
    "invariance",
    "invariant",
    "logprobs",
]

if TYPE_CHECKING:
    from parity_audit.api import audit, audit_live, capture, diff, invariance, logprobs
    from parity_audit.batch_invariant.context import invariant
    from parity_audit.core.errors import (
        BackendFailed,
        CannotRun,
        CaptureBroken,
        EnvFailed,
        NotJudged,
        ParityError,
        SpecError,
        UsageError,
        WorkerDied,
    )
    from parity_audit.core.invariance_report import InvarianceReport
    from parity_audit.core.logprob_report import LogprobReport
    from parity_audit.core.report import (
        Candidate,
        DetectionLimit,
        Finding,
        HookEdit,
        LogitsDelta,
        Patch,
        Patched,
        Proof,
        Report,
        Side,
        SiteDelta,
        Verdict,
    )
    from parity_audit.core.rollouts import Sampling
    from parity_audit.core.types import BackendRef, NotTested, NotVisible
    from parity_audit.report.frame import findings_frame


class _Package(ModuleType):
    """The type of this package: it does not let a subpackage named like an API function (`audit`, `capture`) hide that function.

    Importing the subpackage `parity_audit.audit` would otherwise set the attribute `audit` of this package to a module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
