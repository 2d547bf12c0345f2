"""What an audit costs: its wall time over the sum of loading and running each backend bare, its peak memory over the
largest backend alone, and both beside TransformerLens's own benchmark suite on the same checkpoint.

    python benchmarks/cost.py --size mini small --model meta-llama/Llama-3.2-1B
    python benchmarks/cost.py --size small --model gemma-2-2b-it --all-probes
    python benchmarks/cost.py --quick --size full --dtype bfloat16 --model gemma-2-2b-it --out benchmarks/real_sizes

The second form asks what `--quick` costs beside loading each backend bare and running one short probe for its logits, and writes
what it measured as JSON and Markdown; sizes are measured one by one, and a size that the JSON has is measured anew.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parity_audit.cache.root import cache_root
from parity_audit.capture.plan import QUICK_PROBES, plan_audit, side_plan
from parity_audit.capture.scratch import bytes_below
from parity_audit.capture.session import Session
from parity_audit.capture.workspace import WORKING
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.progress import SILENT
from parity_audit.core.wire import RunRequest
from parity_audit.specs.view import taps

BACKENDS = ("hf", "transformer_lens", "vllm")
PACKAGES = ("torch", "transformers", "transformer_lens", "transformer-lens", "vllm", "python")
PROBES = ("short", "repeated", "ragged", "left_padded")


def bare(backend: str, model: str, size: str, dtype: str, probes: Sequence[str] | None, device: str) -> None:
    """Load one backend and run every probe for its logits alone: what anybody would have to pay; None for the default probes."""
    plan = plan_audit(
        model, synthetic=size, seed=0, weights=None, probes=probes, dtype=dtype, device=device, cache=cache_root()
    )
    with tempfile.TemporaryDirectory() as out:
        session = Session(
            plan=side_plan(plan, parse_backend(backend), install=True, progress=SILENT), log=Path(out) / "log"
        )
        version = session.description().version
        every = taps(plan.model.spec, session.plan.backend_key, plan.config, version)
        logits = tuple(tap for tap in every if tap.site == "logits")
        for probe in plan.probes:
            session.run(RunRequest(probe=replace(probe, kept=()), taps=logits, out=out))
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
    """What one command took: wall seconds, processor seconds, peak MiB of its process tree, and of its scratch files."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    disk_mib: float


def measured(command: list[str], good: Sequence[int] = (0,)) -> Cost:
    """Run a command and see what it costs; its exit code is one of `good`."""
    scratch = cache_root() / WORKING
    others = set(scratch.glob("*/"))  # of audits that run beside this one
    started, cpu = time.perf_counter(), _children_cpu()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak, resident, disk = [0.0], [0.0], [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            disk[0] = max(disk[0], sum(map(bytes_below, set(scratch.glob("*/")) - others)))
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
    if code not in good:
        raise SystemExit(f"exit code {code} of {' '.join(command)}: nothing was measured")
    return Cost(
        seconds=round(time.perf_counter() - started, 1), cpu_seconds=round(_children_cpu() - cpu, 1),
        peak_mib=round(peak[0]), disk_mib=round(disk[0] / (1 << 20)),
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
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all-probes", action="store_true", help="the default probes, long and decoded ones too")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--candidate", nargs="+", default=["transformer_lens"])
    parser.add_argument("--out", type=Path, default=Path("real_sizes"))
    args = parser.parse_args()
    if args.bare:
        probes = None if args.all_probes else QUICK_PROBES if args.quick else PROBES
        return bare(args.bare, args.model, args.size[0], args.dtype, probes, args.device)
    if args.suite:
        return suite(args.model, args.size[0])
    if args.quick:
        for size in args.size:
            quick(args.model, size, args.dtype, args.candidate, args.out)
        return None
    print(json.dumps({size: _measure_size(args.model, size, args.all_probes) for size in args.size}, indent=1))
    return None


def quick(model: str, size: str, dtype: str, candidates: Sequence[str], out: Path) -> None:
    """Measure one size with `--quick`, and write all that `out` has: OUT.json and OUT.md."""
    own = [sys.executable, __file__, "--model", model, "--size", size, "--dtype", dtype, "--quick"]
    alone = {backend: measured([*own, "--bare", backend]) for backend in ("hf", *candidates)}
    command = [sys.executable, "-m", "parity_audit", model, "--synthetic", size, "--dtype", dtype, "--quick", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        command += [word for one in candidates for word in ("-c", one)]
        audit = measured([*command, "--out", folder], good=(0, 1))
        report = json.loads((Path(folder) / "report.json").read_text())
    path = out.with_suffix(".json")
    known = json.loads(path.read_text()) if path.is_file() else {}
    known[f"{model} {size} {dtype}"] = {
        "command": f"parity-audit {' '.join(command[3:])}",
        "versions": {
            name: {key: str(value) for key, value in about.items() if key in PACKAGES}
            for name, about in report["environment"]["backends"].items()
        },
        "verdicts": {one["backend"]: one["verdict"] for one in report["candidates"]},
        "bare": {backend: asdict(cost) for backend, cost in alone.items()},
        "audit": asdict(audit),
        "wall_ratio": round(audit.seconds / sum(cost.seconds for cost in alone.values()), 2),
        "memory_ratio": round(audit.peak_mib / max(cost.peak_mib for cost in alone.values()), 2),
    }
    path.write_text(json.dumps(known, indent=1) + "\n")
    out.with_suffix(".md").write_text(_table(known))


def _table(known: dict[str, dict[str, Any]]) -> str:
    """One row per size."""
    rows = [
        "# What `--quick` costs",
        "",
        "Written by `python benchmarks/cost.py --quick`. Bare: each backend loads and runs one short probe for its logits, in a "
        "process of its own. Memory is the peak of the whole process tree, shared pages counted once; disk that of scratch files.",
        "",
        "| model | bare backends | audit | wall ratio | peak memory: audit, largest backend | ratio | disk | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in known.items():
        bare = ", ".join(f"{backend} {cost['seconds']:.0f} s" for backend, cost in one["bare"].items())
        largest = max(cost["peak_mib"] for cost in one["bare"].values())
        rows.append(
            f"| {name} | {bare} | {one['audit']['seconds']:.0f} s | {one['wall_ratio']} | {one['audit']['peak_mib']:.0f} MiB, "
            f"{largest:.0f} MiB | {one['memory_ratio']} | {one['audit']['disk_mib']:.0f} MiB | "
            f"{', '.join(f'{key} {value}' for key, value in one['verdicts'].items())} |"
        )
    rows += ["", *(f"- `{one['command']}`: {json.dumps(one['versions'])}" for one in known.values()), ""]
    return "\n".join(rows)


def _measure_size(model: str, size: str, every_probe: bool) -> dict[str, object]:
    own = [sys.executable, __file__, "--model", model, "--size", size, *(["--all-probes"] if every_probe else [])]
    few = [] if every_probe else [word for probe in PROBES for word in ("--probe", probe)]
    alone = {backend: measured([*own, "--bare", backend]) for backend in BACKENDS}
    whole, lens = _audit(model, size, *few), _audit(model, size, *few, "--candidate", "transformer_lens")
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
    """An audit without repair."""
    command = [sys.executable, "-m", "parity_audit", model, "--synthetic", size, "--no-repair", "--quiet", *more]
    with tempfile.TemporaryDirectory() as out:
        return measured([*command, "--out", out])


if __name__ == "__main__":
    main()
