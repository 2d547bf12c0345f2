#!/usr/bin/env python3
"""A matrix on a Ray cluster of two nodes on this machine, one of them killed half-way, against the same matrix in one process.

    python benchmarks/fleet.py OUT [--models 8] [--local-only | --ray-only]

The store is an S3 server (moto) of this process. It prints what ended where, and fails where a cell was answered twice or not at
all, where a card differs from the one that was made without Ray, or where a process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}  # fmt: skip

from parity_audit.core.card import Card
from parity_audit.core.jsonio import to_plain
from parity_audit.matrix.cards import card_path, read_cards
from parity_audit.matrix.cells import Matrix, cells
from parity_audit.matrix.fleet.run import RUNNING, CellState, Fleet, run_fleet
from parity_audit.matrix.fleet.store import Store
from parity_audit.matrix.run import run_cells

MODELS = (
    "gpt2", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2-0.5B", "Qwen/Qwen3-0.6B", "facebook/opt-125m", "EleutherAI/pythia-160m",
    "bigscience/bloom-560m", "bigcode/starcoder2-3b", "EleutherAI/gpt-neo-125M", "allenai/OLMo-2-0425-1B",
)  # fmt: skip
CANDIDATES = (
    "hf", "hf,attn_implementation=sdpa", "spec", "hf,use_cache=false", "hf,attn_implementation=sdpa,use_cache=false",
)  # fmt: skip
BUCKET = "fleet"


def main() -> int:
    """Exit code: 1 where something was lost, done twice, different or left over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--ray-only", action="store_true")
    parser.add_argument("--local-only", action="store_true")
    asked = parser.parse_args()
    matrix = Matrix(
        models=MODELS[: asked.models], candidates=CANDIDATES, synthetic="mini", probes=("short",), repair=False
    )
    wanted = cells(matrix)
    print(f"{len(wanted)} cells: {asked.models} models, {len(CANDIDATES)} candidates")
    if not asked.local_only:
        _on_ray(wanted, asked.out / "ray")
    if not asked.ray_only:
        started = time.perf_counter()
        list(run_cells(wanted, asked.out / "local"))
        print(f"one process: {time.perf_counter() - started:.0f} s")
    wrong = _differences(asked.out / "ray", asked.out / "local") if (asked.out / "local").is_dir() else []
    print("\n".join(wrong) or "no difference")
    return 1 if wrong else 0


def _on_ray(wanted, folder: Path) -> None:
    import boto3
    from moto.server import ThreadedMotoServer
    from ray.cluster_utils import Cluster

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    store = f"s3://{BUCKET}/cards"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        _killed_half_way(wanted, folder, store, cluster, second)
    finally:
        cluster.shutdown()
    _tell(wanted, Store.at(store), second.node_id[:8])
    server.stop()
    time.sleep(2)
    left = [name for name in _processes() if name]
    print(f"processes left: {len(left)}")
    assert not left, left


def _killed_half_way(wanted, folder: Path, store: str, cluster, second) -> None:
    started, node = time.perf_counter(), second.node_id[:8]
    states: list[CellState] = []

    def watch(seen: list[CellState]) -> None:
        states[:] = seen

    alive = True
    for done, card in enumerate(run_fleet(wanted, folder, Fleet(on="ray", store=store, watch=watch)), start=1):
        print(
            f"{time.perf_counter() - started:6.1f} s  {done:2}  {card.verdict.value:8} {card.asked.model} {card.asked.candidate}",
            flush=True,
        )
        there = [one.asked for one in states if one.state == RUNNING and one.node == node]
        if alive and done >= len(wanted) // 2 and there:
            print(
                f"{time.perf_counter() - started:6.1f} s  node {node} is killed, with {there[0].model} {there[0].candidate} on it",
                flush=True,
            )
            cluster.remove_node(second, allow_graceful=False)
            alive = False
    assert not alive, "the node was never killed"
    print(f"two nodes, then one: {time.perf_counter() - started:.0f} s")


def _tell(wanted, store: Store, killed: str) -> None:
    """Who ended what: one record for each task that came to its end."""
    records = [json.loads(store.read(f"runs/{name}") or b"{}") for name in sorted(store.names("runs"))]
    ends = [one["what"] for one in records if not one["what"].startswith("captures-")]
    references = [one["what"] for one in records if one["what"].startswith("captures-")]
    names = {card_path(Path(), asked).stem for asked in wanted}
    by_node: dict[str, int] = {}
    for one in records:
        by_node[one["node"]] = by_node.get(one["node"], 0) + 1
    print(f"cells that ended: {len(ends)}, different ones {len(set(ends))}, of {len(names)}")
    print(f"references captured: {len(references)}, different ones {len(set(references))}")
    print(
        "tasks by node: "
        + ", ".join(f"{node}{' (killed)' if node == killed else ''} {count}" for node, count in by_node.items())
    )
    print(f"captures left in the store: {len(store.names('captures'))} files")
    assert sorted(ends) == sorted(names), "a cell is lost, or was answered twice"
    assert len(references) == len(set(references)), "a reference was captured twice"


def _differences(one: Path, other: Path) -> list[str]:
    """Cards that are not the same but for the time at which they were made."""
    pairs = [
        {card_path(Path(), card.asked).name: _lasting(card) for card in read_cards(folder)} for folder in (one, other)
    ]
    out = [f"only in one: {name}" for name in pairs[0].keys() ^ pairs[1].keys()]
    for name in sorted(pairs[0].keys() & pairs[1].keys()):
        mine, theirs = pairs[0][name], pairs[1][name]
        out += [f"{name}: {key}: {mine[key]} / {theirs[key]}" for key in mine if mine[key] != theirs[key]]
    print(f"cards compared: {len(pairs[0].keys() & pairs[1].keys())}")
    return out


def _lasting(card: Card) -> dict[str, object]:
    plain = to_plain(card)
    plain.pop("date")
    return plain


def _processes() -> list[str]:
    """Workers of this cache that are still there."""
    mine = f"PARITY_AUDIT_CACHE={os.environ.get('PARITY_AUDIT_CACHE', '')}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = {line.partition(b"=")[0] for line in (folder / "environ").read_bytes().split(b"\0")}
            if b"PARITY_AUDIT_WORKER" in marked and mine in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
