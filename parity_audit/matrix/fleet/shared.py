"""The captures of a reference and of its judge, taken once for all cells that share them and kept in the store.

Captures are named by the hash of everything that determines their numbers except the machine. Floating-point results of the same
kernel differ between processors, so each kind of machine has its own folder. A cell that finds no captures from its kind of machine
captures reference and judge itself.
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
"""Facts (`DECIDING`) and environment variables (`THREADS`) of a machine that affect the bits of a capture beside its own name."""


def shared_key(asked: Asked) -> str:
    """Return a key that is equal for cells with the same reference on the same probes under the same conditions."""
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
    """Return the folder in the store for the captures that this cell shares with others on this kind of machine."""
    here = this_machine()
    kind = dumps([[here[key] for key in DECIDING], [here["variables"].get(name) for name in THREADS]])
    return f"captures/{shared_key(asked)}/{hashlib.sha256(kind.encode()).hexdigest()[:8]}"


def share(asked: Asked, store: Store, *, install: bool) -> str:
    """Capture reference and judge into the store, unless a finished capture is there already, and return their folder.

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
    """Copy the shared captures for this cell and this kind of machine to `target` and return it; None if there are none."""
    place = place_of(asked)
    names = _finished(store, place) if asked.question is Question.AUDIT else []
    for name in names:
        store.get_folder(f"{place}/{name}", target / name)
    return target if names else None


def _finished(store: Store, place: str) -> list[str]:
    """Return the names of the captures that are complete: their manifest, which is written last, exists."""
    return sorted(name.partition("/")[0] for name in store.names(place) if name.endswith(f"/{MANIFEST_NAME}"))


def _captured(asked: Asked, out: Path, *, install: bool) -> list[str]:
    """Capture reference and judge below `out` as an audit of this cell does, and return the names of the captures' folders."""
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
