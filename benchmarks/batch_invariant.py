"""Greedy completions under random batch sizes, with and without `parity_audit.invariant()`, and what the mode costs.

    python benchmarks/batch_invariant.py [--completions 1000] [--tokens 64] [--device cuda] [--out benchmarks/batch_invariant.md]

Completions: one prompt, decoded greedily from the cache in batches of 1 to 12 copies of it, by a random Llama (2 layers, 128
wide, float32). The rows of its head come in pairs that differ by 1e-6 of their size, so that the two likeliest tokens are
nearly tied at every step: a stress for the last bits, which a trained model meets only now and then. Without the mode the
batch size decides some of these ties; with it there must be one completion, or the program fails.

Overhead: seconds of a decoding step and of a prompt of 128 tokens, plain and with the mode in turns, as the median ratio
of pairs of neighbouring runs,
for the Llama-3.2 and Gemma-2 miniatures and for a random Llama of 100 million parameters. The first pass of a shape, in
which faster calls are compared with the definition, is timed once: `first 64 tokens` is a generation with the mode as the
first one of a process, to the same generation without. With one thread on the CPU the time is that of the processor, so that
other work on the machine counts little. With `--device cuda` the plain runs are those of cuBLAS and torch's attention.

Every line is printed, and the page written, as soon as it is measured.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import parity_audit
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

LARGEST_BATCH = 12
TIE = 1e-6
REPEATS = 15
"""Pairs: other work on the machine slows both runs of a pair, and the median leaves out the pairs that it slowed by halves."""
LARGE, LARGE_REPEATS = 50_000_000, 5
"""Parameters from which on fewer pairs are timed, and how many: such a model takes seconds for one."""
PROMPT = 16
MINIATURES = ("meta-llama/Llama-3.2-1B", "gemma-2-2b-it")


def main() -> None:
    """Print both tables and write them as Markdown; exit 1 where the mode leaves more than one completion."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models are timed")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("NOT TESTED: no CUDA device")
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__, "threads": given.threads,
        "completions": given.completions, "tokens": given.tokens, "unique": unique(given.completions, given.tokens),
        "overhead": [],
    }  # fmt: skip
    for name, model in models():
        for what, ratio in overhead(model.to(given.device)):
            found["overhead"].append({"model": name, "what": what, **ratio})
            print(
                f"{name}  {what}  {ratio['plain_ms']:.2f} to {ratio['invariant_ms']:.2f} ms  {ratio['ratio']:.2f}x",
                flush=True,
            )
            if given.out:
                given.out.write_text(page(found))
    sys.exit(int(found["unique"]["invariant"] != 1))


def page(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    unique_, rows = found["unique"], [
        f"| {one['model']} | {one['what']} | {one['pairs']} | {one['plain_ms']:.2f} | {one['invariant_ms']:.2f} "
        f"| {one['ratio']:.2f}x | {one['low']:.2f}x to {one['high']:.2f}x |"
        for one in found["overhead"]
    ]  # fmt: skip
    lines = [
        "# Batch-invariant mode: completions and cost", "",
        f"Made by `python benchmarks/batch_invariant.py --threads {found['threads']} --out benchmarks/batch_invariant.md`: torch "
        f"{found['torch']}, {found['device']}, {found['threads']} thread(s).", "",
        f"{found['completions']} greedy completions of {found['tokens']} tokens in batches of random size: {unique_['plain']} "
        f"unique without the mode, {unique_['invariant']} with it.", "",
        "Cost: pairs of neighbouring runs, without and with the mode; medians, and the quartiles of the ratios"
        + (". Processor time." if found["threads"] == 1 else "."),
        "`first 64 tokens` holds what comparing calls with the definition takes at the first meeting of each shape.", "",
        "| model | what | pairs | plain, ms | invariant, ms | ratio | quartiles |", "|---|---|---:|---:|---:|---:|---|", *rows,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def unique(completions: int, tokens: int) -> dict[str, int]:
    """Number of different completions, without and with the mode."""
    model = nearly_tied()
    found = {}
    for mode, context in (("plain", nullcontext), ("invariant", parity_audit.invariant)):
        with context():
            found[mode] = len({text for batch in batches(completions) for text in completed(model, batch, tokens)})
        print(f"{mode}: {found[mode]} unique of {completions} completions of {tokens} tokens", flush=True)
    return found


def batches(completions: int) -> list[int]:
    """Random batch sizes that add up to so many completions."""
    generator, sizes = torch.Generator().manual_seed(0), []
    while completions:
        size = min(completions, int(torch.randint(1, LARGEST_BATCH + 1, (1,), generator=generator)))
        sizes.append(size)
        completions -= size
    return sizes


def nearly_tied() -> LlamaForCausalLM:
    """A random Llama whose head has every row twice, but for `TIE`."""
    torch.manual_seed(0)
    model = random_llama(
        hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    weight = model.lm_head.weight.data
    weight[1::2] = weight[::2] * (1 + TIE * torch.randn_like(weight[::2]))
    return model


def random_llama(**sizes: int) -> LlamaForCausalLM:
    """Random weights ten times the usual size for an untrained model, so that its texts are not all the same."""
    config = LlamaConfig(initializer_range=0.2, tie_word_embeddings=False, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def completed(model: Any, batch: int, tokens: int) -> list[tuple[int, ...]]:
    """Greedy completions of one prompt in a batch of copies of it."""
    cache, texts = DynamicCache(), []
    new = (torch.arange(PROMPT, device=model.device) * 7 % 512).expand(batch, -1)
    for _ in range(tokens):
        new = model(new, past_key_values=cache).logits[:, -1:].argmax(-1)
        texts.append(new)
    return [tuple(row) for row in torch.cat(texts, dim=1).tolist()]


def models() -> Any:
    """Names and models to time."""
    with tempfile.TemporaryDirectory() as folder:
        for name in MINIATURES:
            checkpoint = miniature.make(resolve_model(name), root=Path(folder))
            for attention in ("eager", "sdpa"):
                yield (
                    f"{name} miniature, float32, {attention}",
                    AutoModelForCausalLM.from_pretrained(checkpoint.path, attn_implementation=attention).eval(),
                )
    model = random_llama(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=17600
    )
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    yield f"random Llama, {millions:.0f} million parameters, float32, sdpa", model


def overhead(model: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Milliseconds, plain and with the mode in turns, and the ratio of medians."""
    large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    yield "first 64 tokens", paired(lambda: generation_seconds(model, 64), 1)
    ways = {
        "decode, batch 1": lambda: decode_seconds(model, 1),
        "decode, batch 8": lambda: decode_seconds(model, 8),
        "prefill, 128 tokens": lambda: prefill_seconds(model),
    }
    for what, seconds in ways.items():
        seconds()
        with parity_audit.invariant():
            seconds()
        yield what, paired(seconds, LARGE_REPEATS if large else REPEATS)


def paired(seconds: Callable[[], float], pairs: int) -> dict[str, float]:
    """Plain and with the mode in turns: medians in milliseconds, and the median and quartiles of the ratios of neighbours."""
    plain, mode = [], []
    for _ in range(pairs):
        plain.append(seconds())
        with parity_audit.invariant():
            mode.append(seconds())
    ratios = [own / base for own, base in zip(mode, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    return {
        "pairs": pairs, "plain_ms": statistics.median(plain) * 1e3, "invariant_ms": statistics.median(mode) * 1e3,
        "ratio": middle, "low": low, "high": high,
    }  # fmt: skip


@torch.no_grad()
def generation_seconds(model: Any, tokens: int) -> float:
    """Seconds of a prompt and so many tokens behind it."""
    started = now(model)
    completed(model, 1, tokens)
    return now(model) - started


@torch.no_grad()
def decode_seconds(model: Any, batch: int, steps: int = 8) -> float:
    """Median seconds of a decoding step after a prompt."""
    cache, new, seconds = DynamicCache(), torch.full((batch, PROMPT), 5, device=model.device), []
    model(new, past_key_values=cache)
    for _ in range(steps):
        started = now(model)
        model(new[:, :1], past_key_values=cache)
        seconds.append(now(model) - started)
    return statistics.median(seconds)


@torch.no_grad()
def prefill_seconds(model: Any) -> float:
    """Seconds of a prompt of 128 tokens."""
    started = now(model)
    model(torch.full((1, 128), 5, device=model.device), use_cache=False)
    return now(model) - started


def now(model: Any) -> float:
    """Seconds, after the device has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


if __name__ == "__main__":
    main()
