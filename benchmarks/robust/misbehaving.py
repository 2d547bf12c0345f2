"""Ports that do what no port should do, as candidates of three audits; a clean one stands before and after them in each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from robust.case import Outcome

ROOT = Path(__file__).resolve().parents[2]
PORT = ROOT / "tests" / "ports" / "misbehaving.py"
SITES = PORT.with_name("plain_llama_sites.yaml")
MODEL = "meta-llama/Llama-3.2-1B"
PROBES = ("--probe", "short", "--probe", "ragged")
GENEROUS, PATIENCE = 600, 90
"""Seconds for a request where nothing hangs, and where something does."""
ENDING = 60
"""Seconds for an audit to end after a signal."""
MARK = b"PARITY_AUDIT_WORKER="
FAILED, DIED, ANSWER, MEMORY = "backend-failed", "worker-died", "bad-answer", "out-of-memory"

AT_ONCE: dict[str, tuple[str, str]] = {  # how the port misbehaves: (error code or verdict, words of the true cause)
    "returns-none": (FAILED, "returned None"), "returns-text": (FAILED, "returned a builtins.str"), "returns-class": (FAILED, "must return a model"),
    "raises": (FAILED, "no such layer"), "raises-key": (FAILED, "KeyError"), "raises-assertion": (FAILED, "AssertionError"),
    "raises-unprintable": (FAILED, "_Unprintable"), "raises-control": (FAILED, "RuntimeError"), "raises-long": (FAILED, "RuntimeError: xxx"),
    "raises-import": (FAILED, "no_such_module_anywhere"), "keyboard-interrupt": (FAILED, "KeyboardInterrupt"),
    "sys-exit-0": (FAILED, "SystemExit: 0"), "sys-exit-text": (FAILED, "cannot go on"), "generator-exit": (FAILED, "GeneratorExit"),
    "recursion": (FAILED, "RecursionError"), "exit-0": (DIED, "exit code 0"), "exit-7": (DIED, "exit code 7"), "abort": (DIED, "SIGABRT"),
    "kill-9": (DIED, "SIGKILL"), "kill-term": (DIED, "SIGTERM"), "segfault": (DIED, "SIGSEGV"), "fork-holds-pipe": (DIED, "exit code 3"),
    "fork-detached": (DIED, "exit code 3"), "memory-error": (MEMORY, "could not allocate"), "memory-torch": (MEMORY, "allocate"),
    "memory-eaten": (MEMORY, "MemoryError"), "disk-full": ("disk-full", "No space left"), "wire-not-json": (ANSWER, "not JSON"),
    "wire-list": (ANSWER, "not a JSON object"), "wire-number": (ANSWER, "not a JSON object"), "wire-deep": (ANSWER, "not JSON"),
    "wire-error": (ANSWER, "failed with 3"), "wire-closed": (DIED, "ended with exit code"), "stdout-closed": (FAILED, "without prints"),
    "stdout-none": (FAILED, "mute"), "environment-cleared": (FAILED, "no environment"), "chdir-gone": (FAILED, "elsewhere"),
}  # fmt: skip
RUNNING: dict[str, tuple[str, str]] = {
    "nan-column": ("inconclusive", "not finite"), "nan-padded": ("inconclusive", "not finite"), "nan-everywhere": ("inconclusive", "not finite"),
    "inf-everywhere": ("inconclusive", "not finite"), "zeros": ("mismatch", ""), "random": ("mismatch", ""), "integers": ("mismatch", ""),
    "empty": ("no pass", ""), "batch-of-one": ("no pass", ""), "batch-axis-wrong": ("no pass", ""), "no-batch-axis": ("no pass", ""),
    "extra-axis": ("no pass", ""), "last-position": ("no pass", ""), "fewer-positions": ("no pass", ""), "fewer-words": ("no pass", ""),
    "more-words": ("no pass", ""), "one-word": ("no pass", ""), "booleans": ("no pass", ""), "complex": (FAILED, "complex64 numbers"), "sparse": ("any", ""),
    "on-meta": ("no pass", ""), "raises-in-forward": (FAILED, "index out of range"), "interrupt-in-forward": (FAILED, "KeyboardInterrupt"),
    "exit-in-forward": (FAILED, "SystemExit"), "dies-in-second-probe": (DIED, "exit code 0"), "prints": ("pass", ""),
    "nan-weight": ("non-finite-weights", "NaN"), "block-missing": ("no pass", ""), "empty-parameters": ("no pass", ""), "head-missing": (FAILED, "NoneType"),
    "no-forward": ("no pass", ""), "half-precision": ("no pass", ""), "on-meta-device": ("no pass", ""), "training-mode": ("pass", ""), "eval-raises": (FAILED, "no eval"),
}  # fmt: skip
HANGING: dict[str, tuple[str, str]] = {
    "hang": ("timeout", "`load`"), "stopped": ("timeout", "`load`"), "wire-no-newline": ("timeout", "`load`"), "hangs-in-second-probe": ("timeout", "`run`"),
}  # fmt: skip
PASSES = ("parity", "exact")
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


def outcomes() -> Iterator[Outcome]:
    """Three audits, and three that are ended from outside."""
    for ways, seconds in ((AT_ONCE, GENEROUS), (RUNNING, GENEROUS), (HANGING, PATIENCE)):
        yield from _audited(ways, seconds)
    for name, kind in SIGNALS.items():
        yield _ended(name, kind)


def _command(hows: Sequence[str], out: Path, seconds: int) -> list[str]:
    ports = [part for how in hows for part in ("-c", f"python:{PORT}:load,sites={SITES},how={how}")]
    options = ("--miniature", *PROBES, "--no-repair", "-q", "--timeout", str(seconds), "--out", str(out))
    return [sys.executable, "-m", "parity_audit", MODEL, *ports, *options]


def _audited(ways: Mapping[str, tuple[str, str]], seconds: int) -> list[Outcome]:
    """Every way as one candidate."""
    hows = ["clean", *ways, "clean"]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(_command(hows, Path(folder), seconds), capture_output=True, text=True)
        path = Path(folder) / "report.json"
        if not path.is_file():
            return [_lost(how, done) for how in ways]
        report = json.loads(path.read_text())
    candidates = report["candidates"]
    lost = len(candidates) != len(hows) or any(candidates[at]["verdict"] not in PASSES for at in (0, -1))
    whole = (
        "results of others lost" * (lost or len(candidates[0]["sites"]) != len(candidates[-1]["sites"])),
        "traceback" * ("Traceback" in done.stderr), f"exit {done.returncode}, not 3" * (done.returncode != 3),
        "processes left behind" * bool(_left()),
    )  # fmt: skip
    each = (time.perf_counter() - started) / len(hows)
    return [
        Outcome(
            group="port as a candidate", name=how, exit=done.returncode, says=_said(found), seconds=each,
            wrong="; ".join(filter(None, (*whole, _wrong(found, *ways[how])))),
        )
        for how, found in zip(ways, candidates[1:-1], strict=True)
    ]  # fmt: skip


def _lost(how: str, done: subprocess.CompletedProcess[str]) -> Outcome:
    """No report at all: the results of all are lost."""
    wrong = f"results of others lost: {done.stderr.strip()[-200:]!r}"
    return Outcome(group="port as a candidate", name=how, exit=done.returncode, says="", seconds=0.0, wrong=wrong)


def _said(found: dict) -> str:  # type: ignore[type-arg]
    return str((found["error"] or {}).get("code") or found["verdict"])


def _wrong(found: dict, wanted: str, words: str) -> str:  # type: ignore[type-arg]
    said, passes = _said(found), found["verdict"] in PASSES
    right = {"no pass": not passes and said != "internal", "pass": passes, "any": said != "internal"}.get(
        wanted, said == wanted
    )
    if not right:
        return f"`{said}`, not `{wanted}`"
    return "" if words in found["why"] else f"the cause is not said: {found['why'][:80]}"


def _ended(name: str, kind: signal.Signals) -> Outcome:
    """An audit whose candidate hangs, ended from outside: its report, if it could write one, says so, and nobody is left."""
    with tempfile.TemporaryDirectory() as folder:
        command = _command(["hang"], Path(folder), GENEROUS)
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
        )  # fmt: skip
        deadline = time.monotonic() + GENEROUS
        log = Path(folder) / "logs"
        while time.monotonic() < deadline and not list(log.glob("candidate-*")) and started.poll() is None:
            time.sleep(0.5)
        time.sleep(3)
        started.send_signal(kind)
        try:
            _, said = started.communicate(timeout=ENDING)
        except subprocess.TimeoutExpired:
            started.kill()
            _, said = started.communicate()
        path = Path(folder) / "report.json"
        verdict = json.loads(path.read_text())["error"]["code"] if path.is_file() else ""
    wanted = (-9, "") if kind is signal.SIGKILL else (130, "interrupted")
    time.sleep(2)  # the kernel ends the workers of a parent that was killed
    wrong = [
        f"exit {started.returncode}, `{verdict}`" * ((started.returncode, verdict) != wanted),
        "processes left behind" * bool(_left()), "traceback" * bool(re.search("Traceback", said)),
    ]  # fmt: skip
    return Outcome(
        group="ended from outside",
        name=name,
        exit=started.returncode,
        says=verdict,
        seconds=0.0,
        wrong="; ".join(filter(None, wrong)),
    )


def _left() -> list[int]:
    """Workers of this cache that are still there; other programs' workers have another cache."""
    own = f"PARITY_AUDIT_CACHE={os.environ.get('PARITY_AUDIT_CACHE', '')}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parts = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if own in parts and any(part.startswith(MARK) for part in parts):
            found.append(int(folder.name))
    return found
