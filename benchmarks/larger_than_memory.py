#!/usr/bin/env python3
"""Audits of a model whose weights are larger than the memory that the whole audit may use.

    sudo python benchmarks/larger_than_memory.py --limit-mib 1900 --out larger.json

A Llama of 3.7 GiB is written, and an audit of it runs in a memory control group: its processes together may hold no more
than the limit, pages of the checkpoint apart that were cached before; what would is killed. The reference and its float64
run keep their weights on disk (`device_map`) and bring one block at a time, the candidate is the spec's formulas, which read
the checkpoint block by block. One candidate is right, the other has two wrong constants, whose causes are to be found and repaired.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cost import measured

LAYERS, D_MODEL, D_MLP, D_VOCAB = 64, 1024, 4096, 4096
REFERENCE = 'hf,device_map=auto,max_memory={"cpu": "100MB"}'
CANDIDATES = ("spec", "spec,rope.theta=10000,attention.scale=9")
FINISHED = (0, 1)
"""Exit codes of an audit that judged its candidates."""
EXPECTED = {"rope.theta", "attention.scale"}
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


def written(folder: Path) -> int:
    """Write the checkpoint, and give its bytes."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=D_MODEL, intermediate_size=D_MLP, num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=D_VOCAB, max_position_embeddings=4096, rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="300MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def limited(mib: int) -> Iterator[Path]:
    """A memory control group of this size; of the first or the second version, whichever this machine has.

    Raises:
        SystemExit: this user may not make one.
    """
    first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if first else CGROUPS) / "parity-audit-benchmark"
    try:
        group.mkdir(exist_ok=True)
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(mib * MIB))
    except OSError as error:
        raise SystemExit(f"no memory control group can be made here ({error}): run it as root") from error
    try:
        yield group
    finally:
        group.rmdir()


def audited(checkpoint: Path, out: Path, group: Path) -> dict[str, Any]:
    """What one audit of both candidates found and took."""
    asked = [part for candidate in CANDIDATES for part in ("-c", candidate)]
    command = [
        sys.executable, "-m", "parity_audit", str(checkpoint), "-r", REFERENCE, *asked, "--probe", "short", "--out", str(out),
    ]  # fmt: skip
    took = measured(["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command], good=FINISHED)
    candidates = json.loads((out / "report.json").read_text())["candidates"]
    return {
        "seconds": took.seconds,
        "peak_mib": took.peak_mib,
        "candidates": [said(candidate) for candidate in candidates],
    }


def said(candidate: dict[str, Any]) -> dict[str, Any]:
    """Verdict, findings, and the verdict after the repair."""
    patched = candidate.get("patched") or {}
    return {
        "settings": candidate["settings"], "verdict": candidate["verdict"],
        "findings": {finding["knob"]: finding["candidate_value"] for finding in candidate["findings"]},
        "patched": patched.get("verdict"),
        "broke_off": [item["what"] for item in candidate["not_tested"] if "broke off" in item["why"]],
    }  # fmt: skip


def main() -> int:
    """1 where an answer is not the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=1900)
    parser.add_argument("--out", type=Path, default=Path("larger_than_memory.json"))
    asked = parser.parse_args()
    with limited(asked.limit_mib) as group, tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "llama"
        size = written(checkpoint)
        answer = audited(checkpoint, Path(folder) / "out", group)
    right, wrong = answer["candidates"]
    answer = {"weights_mib": round(size / MIB), "limit_mib": asked.limit_mib, **answer}
    asked.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer, indent=1))
    good = right["verdict"] in ("exact", "parity") and set(wrong["findings"]) == EXPECTED
    return 0 if good and wrong["patched"] in ("exact", "parity") else 1


if __name__ == "__main__":
    sys.exit(main())
