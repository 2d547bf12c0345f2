#!/usr/bin/env python3
"""How an engine that is cut over ranks grows: memory of each rank, time, and what the ranks hand over, for Llamas of some sizes.

    python benchmarks/ranks.py --tokens 256 --size 256x4 --size 1024x4 --size 1024x16

Each row is an engine that is loaded and asked for every site of one text. Memory is the peak of each process that holds a
part of the model; what is handed over follows from how the sites were joined: a rank leaves its part of a site that is cut,
and all of one that is not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cost import tree_of
from growth import MIB, llama_of, write_text

from parity_audit.cache.root import cache_root
from parity_audit.capture.plan import plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.take import take_capture
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.progress import SILENT
from parity_audit.core.shards import WHOLE

CANDIDATES = ("vllm", "vllm,tensor_parallel_size=2", "vllm,pipeline_parallel_size=2", "hf", "hf,tp=2")


def main() -> None:
    """One row per size and candidate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--size", action="append", help="D_MODELxLAYERS")
    parser.add_argument("--candidate", action="append", default=None)
    asked = parser.parse_args()
    print(
        "| d_model | layers | parameters | candidate | peak memory of each rank, MiB | load, s | all sites, s | handed over, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in asked.size or ("256x4", "1024x4", "1024x16"):
        d_model, layers = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            count = llama_of(Path(folder) / "model", d_model, layers)
            for number, candidate in enumerate(asked.candidate or CANDIDATES):
                out = Path(folder) / str(number)
                figures = _measured(Path(folder) / "model", candidate, asked.tokens, out)
                row = (d_model, layers, f"{count / 1e6:.1f}M", f"`{candidate}`", *figures)
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def _measured(model: Path, candidate: str, tokens: int, out: Path) -> tuple[str, str, str, str]:
    """Memory, seconds to load and to show every site, and what the ranks handed over."""
    out.mkdir()
    text = out / "prompts.jsonl"
    write_text(text, tokens)
    plan = plan_audit(
        str(model), synthetic=None, seed=0, weights=None, probes=["one"], dtype="float32", device="cpu", cache=cache_root(),
        prompts=text,
    )  # fmt: skip
    session = Session(plan=side_plan(plan, parse_backend(candidate), install=True, progress=SILENT), log=out / "log")
    started = time.perf_counter()
    session.description()
    loaded = time.perf_counter()
    probes = [probe for probe in plan.probes if probe.name != "one"]
    capture = take_capture(session, probes, out / "capture", with_weights=False)
    shown = time.perf_counter()
    ranks = max((len(share.ranks) for share in capture.manifest.shares), default=1)
    peaks = sorted(_peaks(), reverse=True)[: max(ranks, 2 if "=2" in candidate else 1)]
    how = {share.site: len(share.ranks) if share.how == WHOLE else 1 for share in capture.manifest.shares}
    given = sum(capture.tensor(probes[0].name, site).numel() * 4 * times for site, times in how.items())
    session.release()
    return (
        ", ".join(f"{peak:.0f}" for peak in peaks),
        f"{loaded - started:.0f}",
        f"{shown - loaded:.1f}",
        f"{given / MIB:.1f}",
    )


def _peaks() -> Iterator[float]:
    """MiB of the largest resident set that each process below this one had."""
    for process in tree_of(os.getpid()) - {os.getpid()}:
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        yield next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


if __name__ == "__main__":
    main()
