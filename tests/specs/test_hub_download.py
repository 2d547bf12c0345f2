"""Checkpoints come from the hub whole, resumed and checked, or with an error that says what to do. The hub is a local server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub_stand_in
import pytest
import torch
from hub_stand_in import COMMIT, Repository, repository, serving
from interrupting import obey_ctrl_c
from safetensors.torch import load_file, save_file

MODEL = "meta-llama/Llama-3.2-1B"
LIBRARY_PIECE = 10 << 20
"""Bytes that the hub library takes off the wire before it writes any of them."""
LONG = "spiece.model"
"""A long file that is fetched and never opened."""


@pytest.fixture(scope="module")
def sharded(llama, tmp_path_factory) -> Path:
    """The miniature in three shards with an index, as large checkpoints are published."""
    folder = tmp_path_factory.mktemp("sharded")
    for path in Path(llama.path).iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(Path(llama.path) / "model.safetensors")
    names, where = sorted(tensors), {}
    for number in range(3):
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, folder / shard, metadata={"format": "pt"})
        where |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture
def hub(sharded):
    """The repository and the address of a hub that has it."""
    found = repository(sharded)
    with serving({MODEL: found}) as address:
        yield found, address


def environ(tmp_path: Path, address: str, **more: str) -> dict[str, str]:
    """A user's settings: an empty hub cache and this hub."""
    return {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"), "HF_ENDPOINT": address,
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **more}  # fmt: skip


def find(tmp_path: Path, address: str, model: str = MODEL, limit: int = 0, **more: str) -> tuple[dict, str]:
    found, said = hub_stand_in.find(environ(tmp_path, address, **more), tmp_path / "homes", model, limit)
    return found, "\n".join(said)


def test_a_sharded_checkpoint_is_fetched_once_and_found_offline(hub, sharded, tmp_path):
    served, address = hub
    served.files |= {"pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"x", "run.py": b"code",
                     "consolidated.safetensors": b"the same again", "params.json": b"{}"}  # fmt: skip
    found, said = find(tmp_path, address)

    kept = {path.name: path.read_bytes() for path in Path(found["path"]).iterdir()}
    assert kept == {path.name: path.read_bytes() for path in sharded.iterdir()}
    assert sorted(served.fetched()) == sorted(kept)  # nothing else, and nothing twice
    assert (found["revision"], found["by_name"]) == (COMMIT, True)
    assert f"download: asking the hub for {MODEL}" in said
    served.asked.clear()
    assert find(tmp_path, address, HF_HUB_OFFLINE="1")[0] == found
    assert find(tmp_path, address)[0] == found
    assert served.asked == []


def test_workers_load_the_commit_that_was_judged(hub, tmp_path):
    """The cache that a worker is given has one model at one commit, whatever the main branch is by then."""
    served, address = hub
    found, _ = find(tmp_path, address)
    served.revisions["main"] = "d" * 40
    home = Path(found["hf_home"])
    given = environ(tmp_path, address, HF_HOME=str(home), HF_HUB_CACHE=str(home / "hub"), HF_HUB_OFFLINE="1")

    assert hub_stand_in.asked(given, hub_stand_in.loaded_commit, MODEL) == COMMIT


def test_a_revision_is_a_checkpoint_of_its_own(hub, tmp_path):
    served, address = hub
    served.revisions["v2"] = "e" * 40
    assert find(tmp_path, address)[0]["revision"] == COMMIT
    assert find(tmp_path, address, f"{MODEL}@v2")[0]["revision"] == "e" * 40
    assert find(tmp_path, address, f"{MODEL}@{COMMIT}")[0]["revision"] == COMMIT
    refused, _ = find(tmp_path, address, f"{MODEL}@v3")
    assert (refused["code"], refused["exit"]) == ("unknown-revision", 2)


def test_cut_connections_are_taken_up_where_they_broke(hub, sharded, tmp_path):
    served, address = hub
    served.files[LONG] = bytes(LIBRARY_PIECE) * 5
    served.cut_after, served.cuts = LIBRARY_PIECE + 50_000, 3
    found, _ = find(tmp_path, address)

    ranges = [given for method, path, given in served.asked if method == "GET" and given]
    assert len(ranges) == 3
    assert [int(given.removeprefix("bytes=").rstrip("-")) // LIBRARY_PIECE for given in ranges] == [1, 2, 3]
    assert (Path(found["path"]) / LONG).read_bytes() == served.files[LONG]


def test_a_download_that_was_killed_goes_on_from_the_files_that_had_arrived(hub, tmp_path):
    served, address = hub
    served.files[LONG] = bytes(LIBRARY_PIECE) * 3
    served.pause = 0.005
    process, _ = hub_stand_in.start(environ(tmp_path, address), hub_stand_in.found, MODEL, tmp_path / "homes")
    _wait_for(lambda: LONG in served.fetched())
    process.kill()
    process.join()
    arrived = set(served.fetched()) - {LONG}
    served.pause = 0.0
    served.asked.clear()
    find(tmp_path, address)

    assert "config.json" in arrived
    assert set(served.fetched()) == set(served.files) - arrived


def test_a_file_with_other_contents_is_refused_and_not_kept(hub, tmp_path):
    served, address = hub
    served.altered = "model-00002-of-00003.safetensors"
    refused, _ = find(tmp_path, address)
    assert (refused["code"], refused["exit"]) == ("bad-download", 3)
    assert served.altered in refused["message"]
    served.altered = ""
    assert find(tmp_path, address)[0]["revision"] == COMMIT  # the other files are not fetched again
    assert served.fetched().count("model-00001-of-00003.safetensors") == 1
    assert served.fetched().count("model-00002-of-00003.safetensors") == 2


@pytest.mark.parametrize(
    ("status", "header", "code", "says"),
    [
        (403, "GatedRepo", "gated-model", "accept it"),
        (401, "GatedRepo", "gated-model", "hf auth login"),
        (401, "", "missing-weights", "login"),
        (404, "RepoNotFound", "missing-weights", "check the name"),
        (503, "", "hub-unreachable", "again"),
    ],
)
def test_a_refusal_says_what_to_do(hub, status, header, code, says, tmp_path):
    served, address = hub
    served.refused = (status, header)
    refused, _ = find(tmp_path, address)
    assert (refused["code"], refused["exit"]) == (code, 3)
    assert says in refused["hint"]


def test_nobody_answers_and_offline_without_a_cache(tmp_path):
    refused, _ = find(tmp_path, "http://127.0.0.1:9")
    assert (refused["code"], refused["exit"]) == ("hub-unreachable", 3)
    refused, _ = find(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert (refused["code"], refused["exit"]) == ("missing-weights", 3)
    assert "offline mode" in refused["message"]


def test_a_full_disk_is_said_and_what_arrived_is_kept(hub, tmp_path):
    refused, _ = find(tmp_path, hub[1], limit=100_000)  # no file may grow beyond this
    assert (refused["code"], refused["exit"]) == ("disk", 3)
    assert find(tmp_path, hub[1])[0]["revision"] == COMMIT


@pytest.mark.parametrize(("name", "says"), [("pytorch_model.bin", "save_pretrained"), ("model.gguf", "GGUF")])
def test_weights_in_another_form_are_told_what_to_do(name, says, sharded, tmp_path):
    files = {"config.json": (sharded / "config.json").read_bytes(), name: b"weights"}
    with serving({MODEL: Repository(files=files)}) as address:
        refused, _ = find(tmp_path, address)
    assert refused["code"] == "missing-weights"
    assert says in refused["hint"]


def test_ctrl_c_ends_a_download_at_once(hub, tmp_path):
    served, address = hub
    served.pause = 1.0  # a shard takes more than a minute
    command = [sys.executable, "-m", "parity_audit", MODEL, "-c", "hf", "--out", str(tmp_path / "out")]
    given = {**os.environ, **environ(tmp_path, address), "PARITY_AUDIT_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=obey_ctrl_c
    )
    _wait_for(lambda: any(name.endswith(".safetensors") for name in served.fetched()))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130, said
    assert "of 0.0" in said or "download" in said


def _wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.05)


def test_the_tensors_are_those_that_were_published(hub, sharded, tmp_path):
    found, _ = find(tmp_path, hub[1])
    name = "model-00003-of-00003.safetensors"
    fetched, published = load_file(Path(found["path"]) / name), load_file(sharded / name)
    assert all(torch.equal(fetched[key], published[key]) for key in published)
