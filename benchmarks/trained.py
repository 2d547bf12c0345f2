"""Train tiny models on the sources of Python's standard library, so that audits can be tried on trained weights.

    python benchmarks/trained.py --out trained                  # two Qwens, gpt2, Llama, Gemma-2 and a mixture of experts
    python benchmarks/trained.py --out trained --model openai/gpt-oss-20b --steps 150 --batch 4
    parity-audit trained/gpt2 -c transformer_lens

Each model has the released constants and the sizes of its miniature (about a million parameters), so that faults of the corpus can
be planted in it; its architecture's usual initialisation, and the tokenizer of the miniatures. A minute or two each.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from parity_audit.cache.root import cache_root
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.tokenizer import BOS

MODELS = (
    "gpt2",
    "meta-llama/Llama-3.2-1B",
    "gemma-2-2b-it",
    "Qwen/Qwen2-0.5B",
    "Qwen/Qwen3-0.6B",
    "mistralai/Mixtral-8x7B-v0.1",
)
LENGTH, RATE = 128, 3e-3
SOURCES = 120
"""Modules of the standard library that are read: about three million characters."""


def text() -> str:
    """The sources of modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:SOURCES]
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def directory(model: str) -> str:
    """The name of a trained model's directory: the model's own, without its organisation."""
    return model.rsplit("/")[-1]


def train(model_name: str, folder: Path, *, steps: int, batch: int = 16, seed: int = 0) -> float:
    """Train one model, write a checkpoint that transformers loads, and return the loss of the last steps in nats per token."""
    import transformers

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(miniature.make(resolve_model(model_name), root=cache_root() / "synthetic").path)
    for file in made.glob("*token*"):
        shutil.copy(file, folder)
    tokens = encoded(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(made), dtype=torch.float32, attn_implementation="eager"
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        loss = model(rows := drawn(tokens, batch), labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    model.eval().save_pretrained(folder)
    return sum(losses[-20:]) / len(losses[-20:])


def encoded(folder: Path) -> Tensor:
    """The text as one row of token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(text(), add_special_tokens=False).ids)


def drawn(tokens: Tensor, batch: int) -> Tensor:
    """A batch of stretches of the text, each behind a BOS."""
    starts = torch.randint(len(tokens) - LENGTH, (batch,))
    rows = torch.stack([tokens[start : start + LENGTH - 1] for start in starts.tolist()])
    return torch.cat([torch.full((batch, 1), BOS), rows], dim=1)


def main() -> None:
    """Train what was asked for, and say how far each got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", help="any that has a spec; six by default")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--batch", type=int, default=16, help="texts per step; 4 and 150 steps are enough for a norm to be uneven"
    )
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        started = time.perf_counter()
        loss = train(name, asked.out / directory(name), steps=asked.steps, batch=asked.batch)
        print(
            f"{name}: {loss:.2f} nats per token after {asked.steps} steps, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
