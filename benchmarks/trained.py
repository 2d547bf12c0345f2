"""Train tiny models on the sources of Python's standard library, so that audits can be tried on trained weights.

    python benchmarks/trained.py --out trained                  # gpt2, llama, gemma2, qwen3 and a mixture of experts
    python benchmarks/trained.py --out trained --model gpt2 --steps 600
    parity-audit trained/gpt2 -c transformer_lens

Each model has its architecture's released constants and small sizes (1 to 5 million parameters), its usual
initialisation, and the tokenizer of the miniatures. A minute or two each on two cores.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.tokenizer import BOS, EOS, PAD, write_tokenizer

MODELS = {
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": 1024}),
    "llama": ("meta-llama/Llama-3.2-1B", {}),
    "gemma2": ("gemma-2-2b", {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "qwen3": ("Qwen/Qwen3-0.6B", {"head_dim": 32}),
    "mixtral": ("mixtral-8x7b", {"num_local_experts": 4}),
}
USUAL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes where an architecture calls them so."""
VOCAB, LENGTH, BATCH, RATE = 512, 128, 16, 3e-3
SOURCES = 120
"""Modules of the standard library that are read: about three million characters."""


def text() -> str:
    """The sources of modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:SOURCES]
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def train(name: str, folder: Path, *, steps: int, seed: int = 0) -> float:
    """Train one model, write a checkpoint that transformers loads, and return the loss of the last steps in nats per token."""
    import transformers

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, VOCAB)
    tokens = encoded(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config(name), dtype=torch.float32, attn_implementation="eager"
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        loss = model(batch := drawn(tokens), labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(float(loss))
    model.eval().save_pretrained(folder)
    return sum(losses[-20:]) / len(losses[-20:])


def config(name: str) -> Any:
    """The released config with small sizes, as transformers' own class."""
    import transformers

    repo_id, own = MODELS[name]
    released = copy.deepcopy(resolve_model(repo_id).config)
    sizes = {key: value for key, value in USUAL.items() if key in released} | own
    ids = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    kinds = {"layer_types": released["layer_types"][: sizes["num_hidden_layers"]]} if "layer_types" in released else {}
    return transformers.AutoConfig.for_model(**{**released, **sizes, **kinds, **ids})


def encoded(folder: Path) -> Tensor:
    """The text as one row of token ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(text(), add_special_tokens=False).ids)


def drawn(tokens: Tensor) -> Tensor:
    """A batch of stretches of the text, each behind a BOS."""
    starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
    rows = torch.stack([tokens[start : start + LENGTH - 1] for start in starts.tolist()])
    return torch.cat([torch.full((BATCH, 1), BOS), rows], dim=1)


def main() -> None:
    """Train what was asked for, and say how far each got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=500)
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        started = time.perf_counter()
        loss = train(name, asked.out / name, steps=asked.steps)
        print(
            f"{name}: {loss:.2f} nats per token after {asked.steps} steps, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
