"""What the cells of a model share: the captures of its reference and of its judge, taken once, kept in the store.

Captures are named by the hash of everything that decides their numbers except the machine: floating-point results of one kernel
differ between processors. So each kind of machine has a folder of its own, and a cell that meets no capture of its kind of machine
takes its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from parity_audit.audit.context import AuditContext
from parity_audit.audit.question import check_backends, check_options, nothing_left
from parity_audit.audit.run import captured_alone
from parity_audit.capture.plan import opened
from parity_audit.capture.workspace import own_folder
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import Asked, Question
from parity_audit.core.jsonio import dumps
from parity_audit.core.manifest import MANIFEST_NAME
from parity_audit.core.progress import SILENT
from parity_audit.matrix.fleet.store import Store
from parity_audit.report.environment import this_machine
from parity_audit.workers.client import TIMEOUT

DECIDING = ("processor", "platform", "packages")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE")
"""What of a machine and its main environment decides the bits of a capture, beside what the capture's own name holds."""


def shared_key(asked: Asked) -> str:
    """Cells with this in common have the same reference on the same probes."""
    parts = (
        asked.model,
        asked.reference,
        asked.synthetic,
        asked.seed,
        asked.dtype,
        asked.device,
        asked.probes,
        asked.program,
    )
    return hashlib.sha256(dumps(parts).encode()).hexdigest()[:16]


def place_of(asked: Asked) -> str:
    """The folder of the store for captures that cells of this kind share on this kind of machine."""
    here = this_machine()
    kind = dumps([[here[key] for key in DECIDING], [here["variables"].get(name) for name in THREADS]])
    return f"captures/{shared_key(asked)}/{hashlib.sha256(kind.encode()).hexdigest()[:8]}"


def share(asked: Asked, store: Store, *, install: bool) -> str:
    """Capture reference and judge into the store, unless they are there; their folder.

    Raises:
        NotJudged: they could not be captured, or the store could not be written.
    """
    place = place_of(asked)
    if not _finished(store, place):
        with own_folder("fleet-") as made:
            for name in _captured(asked, made, install=install):
                store.put_folder(made / name, f"{place}/{name}", last=MANIFEST_NAME)
    return place


def fetch(asked: Asked, store: Store, target: Path) -> Path | None:
    """The shared captures for this question on this kind of machine, copied to `target`; None where there are none."""
    place = place_of(asked)
    names = _finished(store, place) if asked.question is Question.AUDIT else []
    for name in names:
        store.get_folder(f"{place}/{name}", target / name)
    return target if names else None


def _finished(store: Store, place: str) -> list[str]:
    """Captures whose manifest, which is written last, is there."""
    return sorted(name.partition("/")[0] for name in store.names(place) if name.endswith(f"/{MANIFEST_NAME}"))


def _captured(asked: Asked, out: Path, *, install: bool) -> list[str]:
    """What an audit of this question captures of its reference and judge, below `out`, by their keys."""
    check_options(dtype=asked.dtype, device=asked.device, seed=asked.seed, timeout=TIMEOUT)
    believed = parse_backend(asked.reference)
    workspace, plan = opened(
        out / "log", asked.model, synthetic=asked.synthetic, seed=asked.seed, weights=None, probes=asked.probes or None,
        dtype=asked.dtype, device=asked.device,
    )  # fmt: skip
    context = AuditContext(
        plan=plan, workspace=workspace, install=install, tf32=False, target=0.0, repair=False, hooks=False,
        timeout=TIMEOUT, progress=SILENT,
    )  # fmt: skip
    with nothing_left(workspace):
        check_backends([believed], plan.config)
        return captured_alone(context, believed, out)
