"""What one machine of a fleet does: share the captures of a reference, or answer one cell. No Ray in here.

A task may be run again: after its machine was lost, after it was lost to its machine, or beside a copy that was believed lost.
So it looks for its card first, and writes it last; two that answer the same question write the same file.
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
from parity_audit.report.cases import OF_THE_MACHINE


class MachineFailed(Exception):
    """The machine failed and not the candidate: worth another try, which the card of this one is for when there is none left."""

    def __init__(self, card: str) -> None:
        super().__init__(card)
        self.card = card


def share_reference(asked: Asked, store: Store, install: bool, *, node: str) -> None:
    """Captures for every cell with this reference. What cannot be captured here, each cell will find out and say."""
    started = time.time()
    try:
        place = share(asked, store, install=install)
    except NotJudged as error:
        if error.code == StoreFailed.default_code:
            raise
        return
    _record(store, place.replace("/", "-"), node, started)


def answer_cell(asked: Asked, store: Store, install: bool, *, node: str) -> str:
    """The file name of the card of one cell, which is in the store then.

    Args:
        node: who answers, for the record.

    Raises:
        MachineFailed: disk, memory, an environment or a process failed; nothing was written.
        StoreFailed: the store cannot be used.
    """
    name = card_path(Path(), asked).name
    started = time.time()
    with own_folder("fleet-") as folder:
        if pulled(asked, store, folder) is not None:
            return name
        (card,) = judged(
            [asked], install=install, progress=SILENT, captures=fetch(asked, store, folder / "captures")
        )  # fmt: skip
        path = write_card(card, folder)
        if card.error is not None and card.error.get("code") in OF_THE_MACHINE:
            raise MachineFailed(path.read_text(encoding="utf-8"))
        store.write(name, path.read_bytes())
        _record(store, path.stem, node, started)
    return name


def _record(store: Store, what: str, node: str, started: float) -> None:
    """One file for each task that ended: who did it, when, and how long it took."""
    record = {"what": what, "node": node, "started": started, "seconds": time.time() - started}
    store.write(f"runs/{what}--{uuid.uuid4().hex[:8]}.json", dumps(record).encode())


def pulled(asked: Asked, store: Store, folder: Path) -> Card | None:
    """The current card of a cell, brought from the store into a folder; None where it has none."""
    path = card_path(folder, asked)
    data = store.read(path.name)
    if data is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        Store.at(folder).write(path.name, data)
    return current_card(folder, asked)
