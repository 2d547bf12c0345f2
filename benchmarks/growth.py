#!/usr/bin/env python3
"""How a reference's captures and its memory grow with tokens, layers and d_model: a Llama of each size, captured with its judge.

    python benchmarks/growth.py > growth.md

One size is changed at a time. Disk is that of the captures at every site, memory the peak of the whole process tree.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from cost import measured

BASE = {"tokens": 256, "layers": 4, "d_model": 256}
CHANGED = {"tokens": (64, 1024), "layers": (2, 16), "d_model": (128, 1024)}
HEAD, VOCABULARY = 64, 512
MIB = 1 << 20


def main() -> None:
    """One row per size."""
    print(
        "| tokens | layers | d_model | parameters | reference on disk, MiB | judge on disk, MiB | peak memory, MiB | CPU seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in [BASE, *({**BASE, key: value} for key, values in CHANGED.items() for value in values)]:
        with tempfile.TemporaryDirectory() as folder:
            print(_row(Path(folder), **size), flush=True)


def _row(folder: Path, tokens: int, layers: int, d_model: int) -> str:
    count = llama_of(folder / "model", d_model, layers)
    prompts = folder / "prompts.jsonl"
    write_text(prompts, tokens)
    out = folder / "captured"
    cost = measured(
        [sys.executable, "-m", "parity_audit", "capture", str(folder / "model"), "-b", "hf", "--judge", "--out", str(out),
         "--probe", "one", "--prompts", str(prompts), "--quiet"]
    )  # fmt: skip
    every = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    judge = sum(path.stat().st_size for path in (out / "judge").rglob("*") if path.is_file())
    figures = (f"{(every - judge) / MIB:.1f}", f"{judge / MIB:.1f}", f"{cost.peak_mib:.0f}", f"{cost.cpu_seconds:.0f}")
    return "| " + " | ".join(map(str, (tokens, layers, d_model, f"{count / 1e6:.1f}M", *figures))) + " |"


def llama_of(folder: Path, d_model: int, layers: int) -> int:
    """Save a random Llama of this size, whose heads share keys and values in pairs, and return the number of its parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=d_model, intermediate_size=4 * d_model, num_hidden_layers=layers,
        num_attention_heads=d_model // HEAD, num_key_value_heads=d_model // HEAD // 2, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_text(file: Path, tokens: int) -> None:
    """One prompt of so many token ids, as `--prompts` takes it."""
    file.write_text(json.dumps([3 + at % (VOCABULARY - 3) for at in range(tokens)]) + "\n")


if __name__ == "__main__":
    main()
