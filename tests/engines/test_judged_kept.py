"""An audit that is interrupted behind its first candidate judges that one no second time, unless something else is asked."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interrupting import obey_ctrl_c

from parity_audit.capture.store import RESULTS_ONLY
from parity_audit.capture.workspace import kept_captures

CANDIDATES = ("hf,attn_implementation=sdpa", "spec")


def judged(report: Path) -> dict:
    return json.loads((report / "report.json").read_text())["candidates"][0]


@pytest.mark.timeout(600)
def test_a_judged_candidate_is_reported_from_what_was_kept_of_it(tmp_path):
    cache = tmp_path / "cache"
    own = {**os.environ, "PARITY_AUDIT_CACHE": str(cache)}
    command = [sys.executable, "-m", "parity_audit", "gpt2", "--miniature", "--quick"]
    command += [part for candidate in CANDIDATES for part in ("-c", candidate)]
    first = subprocess.Popen(
        [*command, "--out", str(tmp_path / "interrupted")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=obey_ctrl_c, env=own,
    )  # fmt: skip
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("load: spec"):
            break
    first.send_signal(signal.SIGINT)
    first.stderr.read()
    assert first.wait(60) == 130
    assert kept_captures(cache)[0] == 3, "reference, judge and the judged candidate"
    (kept,) = (cache / "captures").glob(f"*/{RESULTS_ONLY}")
    assert not [*kept.parent.glob("*/*.safetensors")], "nobody asks for its tensors any more"

    other = tmp_path / "other"
    shutil.copytree(cache / "captures", other / "captures")

    def goes_on(out: str, *more: str, cache: Path = cache) -> list[str]:
        run = subprocess.run(
            [*command, *more, "--out", str(tmp_path / out)], capture_output=True, text=True, check=True,
            env={**own, "PARITY_AUDIT_CACHE": str(cache)},
        )  # fmt: skip
        assert "set aside" not in run.stderr
        return [line for line in run.stderr.splitlines() if line.startswith("reuse")]

    captured = [f"reuse: hf in {dtype}, captured by an audit that did not finish" for dtype in ("float32", "float64")]
    kept_one = f"reuse: {CANDIDATES[0]} in float32, judged by an audit that did not finish"
    assert goes_on("again") == [*captured, kept_one]
    assert goes_on("asked otherwise", "--target", "1e-3", cache=other) == captured
    assert kept_captures(cache) == (0, 0)
    assert goes_on("fresh") == []
    kept, fresh = judged(tmp_path / "again"), judged(tmp_path / "fresh")
    assert kept == fresh
    assert kept["settings"]["attn_implementation"] == "sdpa"
