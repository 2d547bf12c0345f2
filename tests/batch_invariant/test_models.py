"""Whole models: prefill, chunks, decoding from the cache, any batch: the same bits at every site, and not without the mode."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariant.every_site import Call, Sites, different, rows, run
from torch import Tensor, nn

import parity_audit

LENGTH, SHORT = 139, 11
"""Tokens: primes, so that they mark the axes of positions; the longer text has more keys than one split of attention."""
CHUNKS = (61, 129, 130, 133)
"""Chunks that end before, in and after the second split, with tails of one, three and six tokens."""
DECODED = (*range(126, 132),)
BACKENDS = ("hf-eager", "hf-sdpa", "bridge")
MODELS = ("gemma", "llama")
DTYPES = (torch.float32, torch.bfloat16)
LAYERS = 2
"""Layers of each model: the least that have every kind of layer (Gemma-2's window is in every other one)."""
Model = tuple[nn.Module, Call, int]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(backend: str, checkpoint: Any, dtype: torch.dtype) -> Model:
    """The model, a function that goes on from a cache, and the size of the vocabulary."""
    from transformers import AutoModelForCausalLM

    attention = backend.removeprefix("hf-") if backend.startswith("hf-") else "eager"
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=dtype, attn_implementation=attention, num_hidden_layers=LAYERS
    ).eval()
    if backend != "bridge":
        return model, lambda tokens, cache: _logits(model, tokens, cache), model.config.vocab_size
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge.boot_transformers(checkpoint.path, hf_model=model, device="cpu", dtype=dtype)
    bridge.eval()

    def step(tokens: Tensor, cache: Any) -> Tensor:
        return bridge(tokens, return_type="logits", **({} if cache is None else {"past_key_values": cache}))

    return bridge, step, bridge.cfg.d_vocab


def _logits(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    return model(tokens, past_key_values=cache, use_cache=cache is not None).logits


def conditions(model: nn.Module, call: Call, texts: Tensor) -> dict[str, tuple[int, Callable[[], Sites]]]:
    """Ways to compute the first text, each with a number of threads."""
    return {
        "chunks, last of 2": (1, lambda: rows(run(model, call, texts[[1, 0]], CHUNKS), 1, 2)),
        "decoded": (1, lambda: run(model, call, texts[:1], DECODED)),
        "third of 5": (1, lambda: rows(run(model, call, texts[[3, 4, 0, 1, 2]], ()), 2, 5)),
        "whole, 2 threads": (2, lambda: run(model, call, texts[:1], ())),
        "chunks and decoded, second of 3, 2 threads": (
            2, lambda: rows(run(model, call, texts[[1, 0, 2]], (61, *DECODED)), 1, 3)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_site_has_the_same_bits_however_it_is_computed(backend, name, request):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    checkpoint = request.getfixturevalue(name)
    different_without = {dtype: _held(*load(backend, checkpoint, dtype), dtype) for dtype in DTYPES}

    assert different_without[torch.float32], "no difference that the mode could remove"
    if not different_without[torch.bfloat16]:
        warnings.warn(
            f"MEASURED: {backend}, {name}: in bfloat16 nothing differs on this machine without the mode either, at "
            f"{LENGTH} tokens decoded, in chunks and in a batch of 5; float32 shows what the mode removes",
            stacklevel=1,
        )


def _held(model: nn.Module, call: Call, vocabulary: int, dtype: torch.dtype) -> list[str]:
    """Hold one model to the same bits in every condition; returns the conditions that differ without the mode."""
    texts = torch.randint(3, vocabulary, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    plain = run(model, call, texts[:1], ())
    without = []
    for way, (_, compute) in list(conditions(model, call, texts).items())[:3]:
        if "returned#0" in different(compute(), plain):
            without.append(way)
            break
    with parity_audit.invariant():
        whole = run(model, call, texts[:1], ())
        for way, (threads, compute) in conditions(model, call, texts).items():
            torch.set_num_threads(threads)
            assert not different(compute(), whole), f"{way}, {dtype}"
        torch.set_num_threads(1)
        short = run(model, call, texts[:1, :SHORT], ())
        assert not different(run(model, call, texts[:1, :SHORT], range(1, SHORT)), short), f"token by token, {dtype}"
    assert len(whole) > 30
    assert not different(run(model, call, texts[:1], ()), plain), "as before the mode"
    ours, theirs = whole["returned#0"].double(), plain["returned#0"].double()
    assert float((ours - theirs).norm() / theirs.norm()) <= 100 * torch.finfo(dtype).eps, (
        "the same function, to rounding"
    )
    return without


def test_nearly_tied_greedy_completions_are_one_with_the_mode_and_several_without():
    """A smaller run of benchmarks/batch_invariant.py: 40 completions of 24 tokens."""
    path = Path(__file__).parents[2] / "benchmarks" / "batch_invariant.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_batches", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    torch.set_num_threads(1)
    assert sum(benchmark.batches(40)) == 40
    found = benchmark.unique(40, 24)
    assert found["invariant"] == 1
    assert found["plain"] > 1
