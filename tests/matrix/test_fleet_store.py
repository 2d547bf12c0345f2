"""The store of a fleet, on disk and on an S3 server; what cells ask of machines; and what one machine does with a cell."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_store import bucket
from report.sample import CLEAN, REPORT
from rich.console import Console
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.cli.live_table import table_of
from parity_audit.core.card import Asked
from parity_audit.core.errors import NotJudged, UsageError, WorkerDied
from parity_audit.core.version import __version__
from parity_audit.matrix import ask
from parity_audit.matrix.cards import card_path
from parity_audit.matrix.cells import Matrix, cells, read_matrix
from parity_audit.matrix.fleet.resources import GB, Resources, Rule, resources_of
from parity_audit.matrix.fleet.run import CellState, Fleet, run_fleet
from parity_audit.matrix.fleet.shared import shared_key
from parity_audit.matrix.fleet.store import Store, StoreFailed
from parity_audit.matrix.fleet.task import MachineFailed, answer_cell, card_from_store

ASKED = Asked(
    model="gpt2", candidate="hf", reference="hf", synthetic="mini", seed=0, dtype="float32", device="cpu",
    probes=("short",), repair=False, program=__version__,
)  # fmt: skip


@pytest.fixture(scope="module")
def s3():
    with bucket() as url:
        yield url


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path, s3) -> Store:
    return Store.at(tmp_path / "store" if request.param == "local" else f"{s3}/{tmp_path.name}")


def test_what_is_written_is_read_and_listed(store, tmp_path):
    store.write("a.json", b"one")
    store.write("a.json", b"two")
    store.write("runs/b.json", b"three")

    assert (store.read("a.json"), store.read("none.json")) == (b"two", None)
    assert store.names() == {"a.json", "runs/b.json"}
    assert store.names("runs") == {"b.json"}
    store.drop("runs")
    store.drop("runs")
    assert store.names() == {"a.json"}


def test_what_another_process_wrote_since_the_last_listing_is_seen(store):
    """A client that keeps listings holds the new file for absent."""
    store.write("a.json", b"one")
    assert store.names() == {"a.json"}
    other = f"from parity_audit.matrix.fleet.store import Store; Store({store.url!r}).write('b.json', b'two')"
    subprocess.run([sys.executable, "-c", other], check=True)

    assert store.read("b.json") == b"two"


def test_a_folder_goes_there_and_back_and_its_manifest_comes_last(store, tmp_path):
    source = tmp_path / "capture"
    (source / "short").mkdir(parents=True)
    (source / "short" / "x.safetensors").write_bytes(b"\0" * 1000)
    (source / "manifest.json").write_text("{}")
    store.put_folder(source, "captures/key", last="manifest.json")
    store.get_folder("captures/key", tmp_path / "back")

    assert (tmp_path / "back" / "short" / "x.safetensors").read_bytes() == b"\0" * 1000
    (source / "short").chmod(0o700)
    (source / "short" / "gone").symlink_to("nowhere")
    with pytest.raises(StoreFailed):
        Store.at(tmp_path / "other").put_folder(tmp_path / "none", "captures/key", last="manifest.json")
    assert Store.at(tmp_path / "other").names() == set()


def test_a_store_that_cannot_be_is_refused_and_one_that_is_not_there_is_said(tmp_path, s3):
    with pytest.raises(UsageError, match="nope"):
        Store.at("nope://somewhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed):
        Store.at(tmp_path / "file").write("below/it.json", b"")
    with pytest.raises(StoreFailed):
        Store.at("s3://no-such-bucket/prefix").write("a.json", b"")


def test_rules_add_up_and_the_last_one_that_speaks_decides():
    rules = (Rule(cpus=2), Rule(candidate="vllm*", gpus=1, memory=40, env={"A": "1"}), Rule(model="*70B*", gpus=4))
    big = replace(ASKED, model="meta-llama/Llama-70B", candidate="vllm==0.32.0")

    assert resources_of(ASKED, rules) == Resources(cpus=2)
    assert resources_of(big, rules) == Resources(cpus=2, gpus=4, memory=40 * GB, env={"A": "1"})
    assert resources_of(replace(ASKED, device="cuda"), ()) == Resources(gpus=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{cpus: 1}", "no list of rules"), ("[{cpu: 1}]", "`cpu` is no key"), ("[{gpus: many}]", "no amount")],
)
def test_a_malformed_rule_is_named(tmp_path, text, says):
    (tmp_path / "m.yaml").write_text(f"models: [gpt2]\ncandidates: [hf]\nresources: {text}\n")
    with pytest.raises(UsageError, match=says):
        read_matrix(tmp_path / "m.yaml")


def test_cells_that_share_a_reference_are_those_of_one_question(tmp_path):
    (tmp_path / "m.yaml").write_text("models: [gpt2]\ncandidates: [hf, vllm]\nresources: [{cpus: 2}]\n")
    matrix = read_matrix(tmp_path / "m.yaml")
    asked = cells(matrix)

    assert matrix.resources == (Rule(cpus=2),)
    assert len({shared_key(one) for one in asked}) == 1
    assert shared_key(ASKED) != shared_key(replace(ASKED, probes=("ids",)))
    assert shared_key(ASKED) != shared_key(replace(ASKED, reference="hf==5.0.0"))
    assert cells(Matrix(models=("gpt2",), candidates=("hf", "vllm"))) == asked


@pytest.fixture
def audits(monkeypatch):
    """The audits that a machine runs, in place of engines; what `answers` holds is raised instead, once each."""
    seen: list[object] = []

    def audit(model, *, captures, **_):
        seen.append(captures)
        if audit.answers:
            raise audit.answers.pop()
        return replace(REPORT, candidates=(CLEAN,))

    audit.answers, audit.seen = [], seen
    monkeypatch.setattr(ask.api, "audit", audit)
    return audit


def test_a_cell_is_answered_once_however_often_its_task_is_run(store, audits, tmp_path):
    for _ in range(3):
        assert answer_cell(ASKED, store, True, node="n1") == card_path(Path(), ASKED).name
    card = card_from_store(ASKED, store, tmp_path / "here")
    (record,) = store.names("runs")

    assert len(audits.seen) == 1
    assert card is not None
    assert card.asked == ASKED
    assert json.loads(store.read(f"runs/{record}"))["node"] == "n1"


def test_a_machine_that_failed_writes_nothing_and_a_candidate_that_failed_does(store, audits):
    audits.answers[:] = [NotJudged("nan", code="non-finite"), WorkerDied("out of memory")]
    with pytest.raises(MachineFailed, match="out of memory"):
        answer_cell(ASKED, store, True, node="n1")
    assert store.names() == set()

    answer_cell(ASKED, store, True, node="n2")
    assert json.loads(store.read(card_path(Path(), ASKED).name))["error"]["code"] == "non-finite"
    answer_cell(ASKED, store, True, node="n2")
    assert len(audits.seen) == 3


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as raised:
        list(run_fleet([ASKED], tmp_path, Fleet(on="ray")))
    assert raised.value.hint == "pip install 'parity-audit[ray]'"
    with pytest.raises(UsageError, match="is no cluster"):
        list(run_fleet([ASKED], tmp_path, Fleet(on="slurm")))
    with pytest.raises(UsageError, match="need a store"):
        list(run_fleet([ASKED], tmp_path, Fleet(on="ray://there:10001")))


def test_a_store_without_a_cluster_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["matrix", "gpt2", "-c", "hf", "--store", str(tmp_path)])

    assert done.exit_code == 2


def test_the_live_table_shows_running_cells_first_and_counts_the_rest():
    states = [CellState(asked=replace(ASKED, seed=seed), state="waiting") for seed in range(40)]
    states[20] = CellState(asked=replace(ASKED, model="the/one"), state="running", node="abcd")
    states[30] = replace(states[30], state="parity")
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table_of(states))
    text = console.export_text()

    assert "1 of 40 cells, 1 running" in text
    assert "and 10 more" in text
    assert text.index("the/one") < text.index("parity") < text.index("waiting")
