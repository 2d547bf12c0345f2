"""Run the cells that have no current card on a cluster: the reference of each model once, then a task for every cell.

The store decides what is done: a cell whose card is there is not run, whoever wrote it. So a fleet that was stopped, or a driver
that died, goes on where it stood.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity_audit.core.card import Asked, Card, Question
from parity_audit.core.errors import NotJudged, ParityError, UsageError, explained
from parity_audit.core.progress import SILENT, Progress
from parity_audit.matrix.cards import SETTLED, card_path, current_card, read_card, write_card
from parity_audit.matrix.fleet.cluster import REMOTE, Cluster, MachineLost, connected
from parity_audit.matrix.fleet.resources import Rule, resources_of
from parity_audit.matrix.fleet.shared import shared_key
from parity_audit.matrix.fleet.store import Store, StoreFailed
from parity_audit.matrix.fleet.task import MachineFailed, answer_cell, pulled, share_reference
from parity_audit.matrix.made import failed_card

RETRIES = 3
WAITING, RUNNING = "waiting", "running"


@dataclass(frozen=True, kw_only=True)
class CellState:
    """A cell as a table shows it: `state` is waiting, running or its verdict; `node` the machine that is or was at it."""

    asked: Asked
    state: str
    node: str = ""


Watch = Callable[[Sequence[CellState]], None]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Where and how: `on` is `ray` or `ray://HOST:PORT`, `store` a path or URL (the folder of the cards where it is None)."""

    on: str
    store: str | None = None
    retries: int = RETRIES
    rules: tuple[Rule, ...] = ()
    watch: Watch = field(default=lambda states: None)


def run_fleet(
    wanted: Sequence[Asked], folder: Path, fleet: Fleet, *, again: bool = False, install: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Card]:  # fmt: skip
    """Yield the card of every cell; those that are new also stand in `folder` and in the store then.

    Raises:
        UsageError: no such cluster or store, or Ray or the store's package is not installed.
        NotJudged: the cluster or the store cannot be reached.
    """
    if fleet.store is None and fleet.on.startswith(REMOTE):
        raise UsageError(
            "the machines of a cluster need a store that all of them can reach", code="bad-store",
            expected="--store s3://BUCKET/PREFIX, or a directory that they share",
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    store = Store.at(fleet.store or folder)
    known = {asked: None if again else _known(asked, store, folder) for asked in wanted}
    yield from (card for card in known.values() if card is not None)
    missing = [asked for asked, card in known.items() if card is None]
    if missing:
        for asked in missing if again else ():
            store.drop(card_path(Path(), asked).name)
        with connected(fleet.on) as cluster:
            yield from _Run(cluster, store, folder, fleet, install, progress).cards(missing)


def _known(asked: Asked, store: Store, folder: Path) -> Card | None:
    """The current card of a cell in the store; one that only this machine has is brought there."""
    found = pulled(asked, store, folder)
    if found is None and (found := current_card(folder, asked)) is not None:
        path = card_path(folder, asked)
        store.write(path.name, path.read_bytes())
    return found


class _Run:
    """One run of cells on a cluster."""

    def __init__(
        self, cluster: Cluster, store: Store, folder: Path, fleet: Fleet, install: bool, progress: Progress
    ) -> None:
        self.cluster, self.store, self.folder, self.fleet = cluster, store, folder, fleet
        self.install, self.progress = install, progress
        self.states: dict[Asked, CellState] = {}

    def cards(self, missing: Sequence[Asked]) -> Iterator[Card]:
        """Every card as its cell ends. Whoever stops listening cancels the rest."""
        self.cluster.require_room([resources_of(asked, self.fleet.rules) for asked in missing])
        self.states = {asked: CellState(asked=asked, state=WAITING) for asked in missing}
        groups = _groups(missing)
        references = {key: self._reference(cells[0]) for key, cells in groups.items() if len(cells) > 1}
        waiting = {self._cell(asked, references.get(shared_key(asked))): asked for asked in missing}
        left = {key: set(cells) for key, cells in groups.items()}
        try:
            while waiting:
                for handle in self.cluster.wait(list(waiting)):
                    asked = waiting.pop(handle)
                    card = self._collected(handle, asked)
                    self._ended(asked, card, len(missing))
                    self._forget(asked, card, left)
                    yield card
                self._look(waiting.values())
        finally:
            self.cluster.cancel([*waiting, *references.values()])

    def _reference(self, asked: Asked) -> Any:
        own = dataclasses.replace(asked, candidate=asked.reference)
        return self.cluster.submit(
            share_reference, own, self.store, self.install, name=f"reference {shared_key(asked)}",
            resources=resources_of(own, self.fleet.rules), retries=self.fleet.retries, retried=(StoreFailed,),
        )  # fmt: skip

    def _cell(self, asked: Asked, after: Any) -> Any:
        return self.cluster.submit(
            answer_cell, asked, self.store, self.install, name=card_path(Path(), asked).stem,
            resources=resources_of(asked, self.fleet.rules), retries=self.fleet.retries,
            retried=(MachineFailed, StoreFailed), after=after,
        )  # fmt: skip

    def _collected(self, handle: Any, asked: Asked) -> Card:
        """The card of a cell that ended, in the folder too; where it could not be had, one that says why."""
        try:
            self.cluster.result(handle)
            card = pulled(asked, self.store, self.folder)
            if card is None:
                found = card_path(self.folder, asked)
                card = read_card(found) if found.is_file() else failed_card(asked, _vanished())
            return card
        except MachineFailed as error:
            card = _parsed(error.card, asked)
        except MachineLost as error:
            card = failed_card(asked, NotJudged(f"lost with its machine: {error}", code="machine-lost"))
        except ParityError as error:
            card = failed_card(asked, error)
        except Exception as error:
            card = failed_card(asked, explained(error))
        self.store.write(card_path(Path(), asked).name, write_card(card, self.folder).read_bytes())
        return card

    def _ended(self, asked: Asked, card: Card, total: int) -> None:
        node = self.states[asked].node
        self.states[asked] = CellState(asked=asked, state=card.verdict.value, node=node)
        done = sum(one.state not in (WAITING, RUNNING) for one in self.states.values())
        self.progress.update("matrix", f"{done} of {total} {asked.model} {asked.candidate} {card.verdict.value}")

    def _forget(self, asked: Asked, card: Card, left: Mapping[str, set[Asked]]) -> None:
        """Captures of a reference are deleted when all its cells are settled; else they are kept for the next try."""
        key = shared_key(asked)
        if key in left and (card.error is None or card.error.get("code") in SETTLED):
            left[key].discard(asked)
            if not left[key]:
                self.store.drop(f"captures/{key}")

    def _look(self, waiting: Iterable[Asked]) -> None:
        running = self.cluster.running()
        for asked in waiting:
            node = running.get(card_path(Path(), asked).stem, "")
            self.states[asked] = CellState(asked=asked, state=RUNNING if node else WAITING, node=node)
        self.fleet.watch(list(self.states.values()))


def _groups(missing: Sequence[Asked]) -> dict[str, list[Asked]]:
    """Audits by the reference that they share."""
    found: dict[str, list[Asked]] = {}
    for asked in missing:
        if asked.question is Question.AUDIT:
            found.setdefault(shared_key(asked), []).append(asked)
    return found


def _parsed(text: str, asked: Asked) -> Card:
    with tempfile.TemporaryDirectory() as folder:
        path = card_path(Path(folder), asked)
        path.write_text(text, encoding="utf-8")
        return read_card(path)


def _vanished() -> NotJudged:
    return NotJudged("its task ended, and its card is not in the store", code="store-failed")
