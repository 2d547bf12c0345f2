"""A Ray cluster of two nodes on this machine, for real: what is tried again, what is cancelled, and a node that is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
from fleet_store import bucket

from parity_audit.core.card import Card
from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.jsonio import to_plain
from parity_audit.matrix.cards import card_path
from parity_audit.matrix.cells import Matrix, cells
from parity_audit.matrix.fleet.cluster import Cancelled, MachineLost, connected
from parity_audit.matrix.fleet.resources import Resources
from parity_audit.matrix.fleet.run import RUNNING, Fleet, run_fleet
from parity_audit.matrix.fleet.store import Store
from parity_audit.matrix.fleet.task import MachineFailed
from parity_audit.matrix.run import run_cells

pytest.importorskip("ray", reason="RAY WAS NOT TESTED: it is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
WANTED = cells(
    Matrix(
        models=("gpt2",), candidates=("hf,attn_implementation=sdpa", "hf,layer_norm_epsilon=0.001", "spec"),
        synthetic="mini", probes=("two",), repair=False,
    )
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _threads():
    """The same number of threads here and on the cluster: floating-point results depend on it."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS")
    os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}


@pytest.fixture
def two_nodes(cache, monkeypatch):
    """A head that runs no cell, and a second node with one CPU that can be killed: every cell begins there."""
    from ray.cluster_utils import Cluster

    with bucket() as url:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        second = made.add_node(num_cpus=1)
        made.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made, second, url
        made.shutdown()


def workers() -> list[str]:
    """Engines' processes of this test's cache."""
    mine, found = f"PARITY_AUDIT_CACHE={os.environ['PARITY_AUDIT_CACHE']}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine in variables and any(one.startswith(b"PARITY_AUDIT_WORKER=") for one in variables):
            found.append(folder.name)
    return found


def lasting(card: Card) -> dict[str, object]:
    plain = to_plain(card)
    plain.pop("date")
    return plain


def test_the_machine_is_tried_again_and_nothing_else(tmp_path):
    """Tasks that count their tries in files; a cluster of our own, as `--on ray` makes one."""

    def tried(name: str) -> int:
        path = tmp_path / name
        path.write_text(f"{path.read_text() if path.is_file() else ''}x")
        return len(path.read_text())

    def dies_once(*, node: str) -> str:
        if tried("dies") == 1:
            os.kill(os.getpid(), 9)
        return node

    def always_dies(*, node: str) -> None:
        tried("always")
        os.kill(os.getpid(), 9)

    def machine(*, node: str) -> int:
        if tried("machine") < 3:
            raise MachineFailed("full disk")
        return 3

    def candidate(*, node: str) -> None:
        tried("candidate")
        raise NotJudged("it is wrong", code="non-finite")

    def sleeps(*, node: str) -> None:
        time.sleep(600)

    with connected("ray") as cluster:

        def submit(run, after=None):
            return cluster.submit(
                run, name=run.__name__, resources=Resources(cpus=0.5), retries=2, retried=(MachineFailed,), after=after
            )

        handles = [submit(run) for run in (dies_once, machine, candidate, always_dies)]
        asleep = submit(sleeps)
        assert len(cluster.result(handles[0])) == 8
        assert cluster.result(handles[1]) == 3
        with pytest.raises(NotJudged, match="it is wrong"):
            cluster.result(handles[2])
        with pytest.raises(MachineLost):
            cluster.result(handles[3])
        deadline = time.monotonic() + 120  # the board is an actor, whose process has to start
        while "dies_once" not in cluster.running() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert "dies_once" in cluster.running()
        begun = time.monotonic()
        cluster.cancel([asleep])
        with pytest.raises(Cancelled):
            cluster.result(asleep)
        assert time.monotonic() - begun < 60
        with pytest.raises(UsageError, match="1e"):
            cluster.require_room([Resources(gpus=1e6)])

    tries = {path.name: len(path.read_text()) for path in tmp_path.iterdir()}
    assert tries == {"dies": 2, "machine": 3, "candidate": 1, "always": 3}


def test_a_fleet_is_stopped_resumed_and_loses_a_node_and_no_cell(two_nodes, tmp_path):
    cluster, second, url = two_nodes
    fleet = Fleet(on="ray", store=f"{url}/cards")
    stopped = run_fleet(WANTED, tmp_path / "first", fleet)
    done = [next(stopped)]
    stopped.close()
    deadline = (
        time.monotonic() + 180
    )  # a worker that loads a model on a busy machine sees late that nobody waits for it
    while workers() and time.monotonic() < deadline:
        time.sleep(1)
    assert workers() == []

    killed: list[str] = []

    def watch(states) -> None:
        there = [one.asked.candidate for one in states if one.state == RUNNING and one.node == second.node_id[:8]]
        if there and not killed:
            killed.extend(there)
            cluster.add_node(num_cpus=1)
            cluster.remove_node(second, allow_graceful=False)

    done = list(run_fleet(WANTED, tmp_path / "second", dataclasses.replace(fleet, watch=watch)))
    store = Store.at(f"{url}/cards")
    records = [json.loads(store.read(f"runs/{name}")) for name in store.names("runs")]

    assert killed
    assert sorted(one["what"] for one in records if not one["what"].startswith("captures-")) == sorted(
        card_path(Path(), asked).stem for asked in WANTED
    )
    assert len({one["what"] for one in records if one["what"].startswith("captures-")}) == 1
    assert store.names("captures") == set()
    here = {card.asked: lasting(card) for card in run_cells(WANTED, tmp_path / "here")}
    assert {card.asked: lasting(card) for card in done} == here
