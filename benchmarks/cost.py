"""What an audit costs: its wall time over the sum of loading and running each backend bare, its peak memory over the
largest backend alone, and both beside TransformerLens's own benchmark suite on the same checkpoint.

    python benchmarks/cost.py --size mini small --model meta-llama/Llama-3.2-1B

Every figure is a process of its own; ratios within one run are what counts, the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from parity_audit.cache.root import cache_root
from parity_audit.capture.plan import plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.progress import SILENT
from parity_audit.core.wire import RunRequest
from parity_audit.specs.view import taps

BACKENDS = ("hf", "transformer_lens", "vllm")
PROBES = ("short", "repeated", "ragged", "left_padded")


def bare(backend: str, model: str, size: str) -> None:
    """Load one backend and run every probe for its logits alone: what anybody would have to pay."""
    plan = plan_audit(
        model, synthetic=size, seed=0, weights=None, probes=PROBES, dtype="float32", device="cpu", cache=cache_root()
    )
    with tempfile.TemporaryDirectory() as out:
        session = Session(
            plan=side_plan(plan, parse_backend(backend), install=True, progress=SILENT), log=Path(out) / "log"
        )
        version = session.description().version
        every = taps(plan.model.spec, session.plan.backend_key, plan.config, version)
        logits = tuple(tap for tap in every if tap.site == "logits")
        for probe in plan.probes:
            session.run(RunRequest(probe=probe, taps=logits, out=out))
        session.release()


def suite(model: str, size: str) -> None:
    """TransformerLens's own benchmark suite on the same checkpoint."""
    from parity_audit.specs import miniature
    from parity_audit.specs.resolve import resolve_model

    made = miniature.make(resolve_model(model), size=size, root=cache_root() / "synthetic")
    os.environ |= {"HF_HOME": str(made.hf_home), "HF_HUB_OFFLINE": "1"}
    from transformer_lens.benchmarks import run_benchmark_suite

    run_benchmark_suite(made.repo_id, device="cpu", verbose=False)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one command took: wall seconds, processor seconds, peak MiB of its process tree."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


def measured(command: list[str]) -> Cost:
    """Run a command and see what it costs."""
    started, cpu = time.perf_counter(), _children_cpu()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak, resident = [0.0], [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            tree = tree_of(process.pid)
            now = sum(map(_resident, tree))
            if now > 1.01 * resident[0]:  # the exact figure stops the process for a while, so it is asked for rarely
                resident[0] = now
                peak[0] = max(peak[0], sum(map(_proportional, tree)))

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    done.set()
    thread.join()
    if code != 0:
        raise SystemExit(f"exit code {code} of {' '.join(command)}: nothing was measured")
    return Cost(
        seconds=round(time.perf_counter() - started, 1), cpu_seconds=round(_children_cpu() - cpu, 1),
        peak_mib=round(peak[0]),
    )  # fmt: skip


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_of(root: int) -> set[int]:
    """A process and everything below it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    tree = {root}
    while grown := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= grown
    return tree


def _resident(pid: int) -> float:
    """Resident MiB of one process, shared pages included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)
    except OSError:
        return 0.0


def _proportional(pid: int) -> float:
    """MiB of one process, pages that several processes share counted once among them (Linux)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--size", nargs="+", default=["mini"])
    parser.add_argument("--bare")
    parser.add_argument("--suite", action="store_true")
    args = parser.parse_args()
    if args.bare:
        return bare(args.bare, args.model, args.size[0])
    if args.suite:
        return suite(args.model, args.size[0])
    print(json.dumps({size: _measure_size(args.model, size) for size in args.size}, indent=1))
    return None


def _measure_size(model: str, size: str) -> dict[str, object]:
    own = [sys.executable, __file__, "--model", model, "--size", size]
    alone = {backend: measured([*own, "--bare", backend]) for backend in BACKENDS}
    whole, lens = _audit(model, size), _audit(model, size, "--candidate", "transformer_lens")
    theirs = measured([*own, "--suite"])
    return {
        "bare": {backend: asdict(cost) for backend, cost in alone.items()},
        "audit": asdict(whole),
        "audit of transformer_lens alone": asdict(lens),
        "run_benchmark_suite": asdict(theirs),
        "wall_ratio": round(whole.seconds / sum(cost.seconds for cost in alone.values()), 2),
        "cpu_ratio": round(whole.cpu_seconds / sum(cost.cpu_seconds for cost in alone.values()), 2),
        "memory_ratio": round(whole.peak_mib / max(cost.peak_mib for cost in alone.values()), 2),
        "suite_over_audit": round(theirs.seconds / whole.seconds, 2),
        "suite_over_audit_of_transformer_lens": round(theirs.seconds / lens.seconds, 2),
    }


def _audit(model: str, size: str, *more: str) -> Cost:
    """An audit without repair, on the probes that the bare runs use."""
    command = [sys.executable, "-m", "parity_audit", model, "--synthetic", size, "--no-repair", "--quiet", *more]
    command += [flag for probe in PROBES for flag in ("--probe", probe)]
    with tempfile.TemporaryDirectory() as out:
        return measured([*command, "--out", out])


if __name__ == "__main__":
    main()
