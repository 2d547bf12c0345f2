"""The audits that only a CUDA device can answer for, in stages of under eight minutes each, resumable.

    python benchmarks/gpu.py                      # every stage that OUT.json does not have yet
    python benchmarks/gpu.py --stage tf32-on      # this one, again if need be
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --device cpu --stage readme --out /tmp/dry     # is the script itself in order?

Every stage is one command of the program in a process of its own. After each, what is known is written to OUT.json and OUT.md, so an
interrupted run goes on where it stopped. Results of another device or program version are not mixed: they are run again.
Exit codes: 0 every stage ended as expected, 1 one did not, 2 no such stage, 3 no CUDA device is here and nothing was run.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parity_audit.core.version import __version__

LIMIT = 470
"""Seconds of a stage: lent machines often stop a command after eight or ten minutes."""
EXIT_NO_DEVICE = 3
MIB = 1 << 20
GEMMA, LLAMA = "gemma-2-2b-it", "meta-llama/Llama-3.2-1B"
BARE = Path(__file__).with_name("cost.py")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`words` of the command line; `exits` and `knobs` (findings that have to be there) are what is expected of it.

    `bare`: the backends to load and run alone, in place of an audit: what its time and memory are held against.
    """

    name: str
    asks: str
    words: tuple[str, ...] = ()
    exits: tuple[int, ...] = (0,)
    knobs: tuple[str, ...] = ()
    bare: str | None = None


FULL = ("--synthetic", "full", "--dtype", "bfloat16")
STAGES = (
    Stage(name="readme", asks="the audit of the README", words=(GEMMA, "--miniature", "-c", "transformer_lens")),
    Stage(
        name="gemma-2024", asks="Gemma-2 in TransformerLens 2.3.0, where its stack installs", exits=(1,), knobs=("attention.scale",),
        words=(GEMMA, "--miniature", "-r", "hf==4.43.2,attn_implementation=sdpa", "-c", "transformer_lens==2.3.0"),
    ),
    Stage(
        name="llama-2024", asks="Llama-3.2 in TransformerLens 2.8.0, where its stack installs", exits=(1,),
        knobs=("rope.theta", "rope.scaling"), words=(LLAMA, "--miniature", "-r", "hf==4.45.2", "-c", "transformer_lens==2.8.0"),
    ),
    Stage(name="tf32-off", asks="float32 without TF32", words=(GEMMA, "--miniature", "-c", "hf", "-c", "transformer_lens")),
    Stage(
        name="tf32-on", asks="TF32 in the candidate alone: named as the cause", exits=(1,), knobs=("numerics.tf32",),
        words=(GEMMA, "--miniature", "-c", "hf,tf32=true"),
    ),
    Stage(
        name="bfloat16", asks="the same in bfloat16",
        words=(GEMMA, "--miniature", "--dtype", "bfloat16", "-c", "hf", "-c", "transformer_lens"),
    ),
    Stage(
        name="vllm", asks="vLLM's CUDA engine beside hf and transformer_lens",
        words=(GEMMA, "--miniature", "-c", "vllm", "-c", "transformer_lens"),
    ),
    Stage(name="bare-hf", asks="2.6 billion parameters in hf alone, loaded and one short probe", words=FULL, bare="hf"),
    Stage(name="bare-transformer_lens", asks="the same in transformer_lens alone", words=FULL, bare="transformer_lens"),
    Stage(name="full", asks="2.6 billion parameters, --quick", words=(GEMMA, *FULL, "--quick", "-c", "transformer_lens")),
)  # fmt: skip


def command_of(stage: Stage, device: str, folder: str) -> list[str]:
    """The command line of a stage."""
    if stage.bare is not None:
        words = [str(BARE), "--model", GEMMA, "--size", "full", "--dtype", "bfloat16", "--quick", "--bare", stage.bare]
        return [sys.executable, *words, "--device", device]
    return [sys.executable, "-m", "parity_audit", *stage.words, "--device", device, "-q", "--out", folder]


def run(stage: Stage, device: str) -> dict[str, Any]:
    """One stage: how it ended, what it found, its wall time and the device memory at its peak."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(stage, device, folder)
        memory, done = [0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(memory, done, device))
        watcher.start()
        started = time.perf_counter()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            code, tail = ended.returncode, ended.stderr.strip().splitlines()[-3:]
        except subprocess.TimeoutExpired:
            code, tail = -1, [f"stopped after {LIMIT} s"]
        seconds = time.perf_counter() - started
        done.set()
        watcher.join()
        path = Path(folder) / "report.json"
        report = json.loads(path.read_text()) if path.is_file() else None
    said = ["parity-audit", *command[3:]] if stage.bare is None else ["benchmarks/cost.py", *command[2:]]
    found = {
        "asks": stage.asks, "command": " ".join(word for word in said if word not in (folder, "--out")),
        "exit_code": code, "seconds": round(seconds, 1), "peak_device_mib": round(memory[0] / MIB), "stderr": tail,
        **({} if report is None else _read(report)),
    }  # fmt: skip
    found["as_expected"] = code in stage.exits and set(stage.knobs) <= set(found.get("findings", ()))
    return found


def _read(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report is kept: verdicts, findings, the noise at the logits, and versions."""
    candidates = report["candidates"]
    return {
        "verdicts": {f"{one['backend']} {one['version']}": one["verdict"] for one in candidates},
        "noise": {one["backend"]: (one["logits"] or {}).get("noise_ratio") for one in candidates},
        "findings": [finding["knob"] for one in candidates for finding in one["findings"]],
        "backends": report["environment"]["backends"],
    }


def _watch(peak: list[int], done: threading.Event, device: str) -> None:
    """The memory in use on the device beyond what was in use at the start, by whichever process."""
    if device != "cuda":
        return
    free = torch.cuda.mem_get_info()[0]
    while not done.wait(0.1):
        peak[0] = max(peak[0], free - torch.cuda.mem_get_info()[0])


def machine(device: str) -> dict[str, str]:
    """What results are only comparable on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    cuda = torch.version.cuda or "none"
    return {"device": device, "name": name, "torch": torch.__version__, "cuda": cuda, "parity-audit": __version__}


def pending(stages: Sequence[Stage], known: dict[str, Any], here: dict[str, str]) -> list[Stage]:
    """The stages without a result of this machine that ended by itself."""
    results = known.get("stages", {}) if known.get("machine") == here else {}
    return [stage for stage in stages if results.get(stage.name, {}).get("exit_code", -1) < 0]


def table(known: dict[str, Any]) -> str:
    """The results as Markdown."""
    here = known["machine"]
    lines = [
        "# Audits on a CUDA device" if here["device"] == "cuda" else "# A dry run: nothing here was run on a GPU",
        "",
        f"Written by `python benchmarks/gpu.py`. {', '.join(f'{key} {value}' for key, value in here.items())}.",
        "",
        "| stage | asks | exit | as expected | verdicts | findings | seconds | peak device memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in known["stages"].items():
        verdicts = ", ".join(f"{key} {value}" for key, value in one.get("verdicts", {}).items())
        said = (verdicts or " ".join(one["stderr"][-1:])).replace("|", "/")
        lines.append(
            f"| {name} | {one['asks']} | {one['exit_code']} | {'yes' if one['as_expected'] else 'no'} | {said} | "
            f"{', '.join(one.get('findings', ())) or '-'} | {one['seconds']} | {one['peak_device_mib']} MiB |"
        )
    return "\n".join([*lines, "", *(f"- {name}: `{one['command']}`" for name, one in known["stages"].items()), ""])


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit code is in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage",
        action="append",
        choices=[stage.name for stage in STAGES],
        help="this one, again if need be; repeatable",
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("gpu"))
    args = parser.parse_args(words)
    if args.list:
        print("\n".join(f"{stage.name:22s} {stage.asks}" for stage in STAGES))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no CUDA device is here (torch {torch.__version__}): nothing was run, and nothing is known of GPUs",
            file=sys.stderr,
        )
        return EXIT_NO_DEVICE
    path, here = args.out.with_suffix(".json"), machine(args.device)
    known = json.loads(path.read_text()) if path.is_file() else {}
    if known.get("machine") != here:
        known = {"machine": here, "stages": {}}
    named = [stage for stage in STAGES if stage.name in (args.stage or ())]
    for stage in named or pending(STAGES, known, here):
        print(f"{stage.name}: {stage.asks} ...", flush=True)
        known["stages"][stage.name] = found = run(stage, args.device)
        print(
            f"  exit {found['exit_code']}, {found['seconds']} s, {'as expected' if found['as_expected'] else 'NOT as expected'}",
            flush=True,
        )
        path.write_text(json.dumps(known, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(known))
    return 0 if all(one["as_expected"] for one in known["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
