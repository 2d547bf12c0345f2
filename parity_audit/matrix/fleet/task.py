"""The tasks that machines of a fleet run: capture a shared reference, or answer one cell. This module does not use Ray.

A task may run more than once: its machine may be lost, its process may be killed, or a copy that was believed lost may still be
running. So a task that answers a cell first looks for a card in the store and writes its own card last; tasks for the same cell
write the same file.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from parity_audit.capture.workspace import own_folder
from parity_audit.core.card import Asked, Card
from parity_audit.core.errors import NotJudged
from parity_audit.core.jsonio import dumps
from parity_audit.core.progress import SILENT
from parity_audit.matrix.cards import card_path, current_card, write_card
from parity_audit.matrix.fleet.shared import fetch, share
from parity_audit.matrix.fleet.store import Store, StoreFailed
from parity_audit.matrix.run import judged
from parity_audit.report.cases import MACHINE_ERROR_CODES


class MachineFailed(Exception):
    """The machine failed, not the candidate, so the cell is tried again.

    `card` is the text of the card with this error, which is used if no tries are left.
    """

    def __init__(self, card: str) -> None:
        super().__init__(card)
        self.card = card


def share_reference(asked: Asked, store: Store, install: bool, *, node: str) -> None:
    """Take the captures that all cells with this reference share.

    If they cannot be captured here, nothing is raised: each cell then takes its own captures and reports an error that it meets.

    Raises:
        StoreFailed: the store cannot be used.
    """
    started = time.time()
    try:
        place = share(asked, store, install=install)
    except NotJudged as error:
        if error.code == StoreFailed.default_code:
            raise
        return
    _record(store, place.replace("/", "-"), node, started)


def answer_cell(asked: Asked, store: Store, install: bool, *, node: str) -> str:
    """Answer one cell unless the store has its current card, and return the file name of the card, which is then in the store.

    Args:
        node: the machine that answers, for the record.

    Raises:
        MachineFailed: disk, memory, an environment or a process failed; nothing was written to the store.
        StoreFailed: the store cannot be used.
    """
    name = card_path(Path(), asked).name
    started = time.time()
    with own_folder("fleet-") as folder:
        if card_from_store(asked, store, folder) is not None:
            return name
        (card,) = judged(
            [asked], install=install, progress=SILENT, captures=fetch(asked, store, folder / "captures")
        )  # fmt: skip
        path = write_card(card, folder)
        if card.error is not None and card.error.get("code") in MACHINE_ERROR_CODES:
            raise MachineFailed(path.read_text(encoding="utf-8"))
        store.write(name, path.read_bytes())
        _record(store, path.stem, node, started)
    return name


def _record(store: Store, what: str, node: str, started: float) -> None:
    """Write a record of a task that ended to the store: its machine, when it started and how long it took."""
    record = {"what": what, "node": node, "started": started, "seconds": time.time() - started}
    store.write(f"runs/{what}--{uuid.uuid4().hex[:8]}.json", dumps(record).encode())


def card_from_store(asked: Asked, store: Store, folder: Path) -> Card | None:
    """Return the current card of a cell after copying it from the store to `folder`; None if the store has no current card."""
    path = card_path(folder, asked)
    data = store.read(path.name)
    if data is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        Store.at(folder).write(path.name, data)
    return current_card(folder, asked)
