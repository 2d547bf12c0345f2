"""Run the cells that have no current card on a cluster: one task per shared reference, then one task per cell.

A cell whose current card is in the store is not run, whichever machine wrote the card. So a run that was stopped, or whose driver
process died, continues with the remaining cells.
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
from parity_audit.matrix.card_from_report import failed_card
from parity_audit.matrix.cards import SETTLED, card_path, current_card, read_card, write_card
from parity_audit.matrix.fleet.cluster import REMOTE, Cluster, MachineLost, connected
from parity_audit.matrix.fleet.resources import Rule, resources_of
from parity_audit.matrix.fleet.shared import shared_key
from parity_audit.matrix.fleet.store import Store, StoreFailed
from parity_audit.matrix.fleet.task import MachineFailed, answer_cell, card_from_store, share_reference

RETRIES = 3
WAITING, RUNNING = "waiting", "running"


@dataclass(frozen=True, kw_only=True)
class CellState:
    """The state of a cell, for a table: `state` is waiting, running or its verdict; `node` is the machine that runs or ran it."""

    asked: Asked
    state: str
    node: str = ""


Watch = Callable[[Sequence[CellState]], None]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Settings of a run on a cluster.

    `on` is `ray` or `ray://HOST:PORT`. `store` is a path or URL; None stands for the folder of the cards. `retries` is how often
    a task is repeated after its first try. `watch` is called with the states of all cells whenever they were updated.
    """

    on: str
    store: str | None = None
    retries: int = RETRIES
    rules: tuple[Rule, ...] = ()
    watch: Watch = field(default=lambda states: None)


def run_fleet(
    wanted: Sequence[Asked], folder: Path, fleet: Fleet, *, again: bool = False, install: bool = True,
    progress: Progress = SILENT,
) -> Iterator[Card]:  # fmt: skip
    """Yield the card of every cell; each is also in `folder` and in the store when it is yielded.

    Args:
        again: run cells that have a current card, too.

    Raises:
        UsageError: the name of the cluster or store is malformed, a remote cluster has no store, a cell asks for more resources
            than a local cluster has, or Ray or the store's package is not installed.
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
    """Return the current card of a cell, or None; a card that is only in `folder` is copied to the store."""
    found = card_from_store(asked, store, folder)
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
        """Yield the card of each cell when its task ends; all other tasks are cancelled if the caller closes the iterator."""
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
        """Return the card of a cell whose task ended, and write it to the folder; if the task failed, a card with the error."""
        try:
            self.cluster.result(handle)
            card = card_from_store(asked, self.store, self.folder)
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
        """Delete the captures of a reference when all cells that use it have a final card.

        A card is final if it has no error, or an error that another try would repeat (`SETTLED`). Otherwise the captures are kept
        for the next run.
        """
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
    """Return the cells that are audits, grouped by the key of the reference that they share."""
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
