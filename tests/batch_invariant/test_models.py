"""Whole models: prefill, chunks, decoding from the cache, any batch: the same bits at every site, and not without the mode."""

from __future__ import annotations

import importlib.util
import os
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
Model = tuple[nn.Module, Call, int]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(backend: str, checkpoint: Any, dtype: torch.dtype) -> Model:
    """The model, a function that goes on from a cache, and the size of the vocabulary."""
    if backend == "bridge":
        from transformer_lens.model_bridge import TransformerBridge

        bridge: Any = TransformerBridge.boot_transformers(checkpoint.path, device="cpu", dtype=dtype)
        bridge.eval()

        def step(tokens: Tensor, cache: Any) -> Tensor:
            return bridge(tokens, return_type="logits", **({} if cache is None else {"past_key_values": cache}))

        return bridge, step, bridge.cfg.d_vocab
    from transformers import AutoModelForCausalLM

    attention = backend.removeprefix("hf-")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype, attn_implementation=attention).eval()
    return (
        model,
        lambda tokens, cache: model(tokens, past_key_values=cache, use_cache=cache is not None).logits,
        model.config.vocab_size,
    )


def conditions(model: nn.Module, call: Call, texts: Tensor) -> dict[str, Callable[[], Sites]]:
    """Ways to compute the first text."""
    return {
        "whole": lambda: run(model, call, texts[:1], ()),
        "chunks, last of 2": lambda: rows(run(model, call, texts[[1, 0]], CHUNKS), 1, 2),
        "decoded": lambda: run(model, call, texts[:1], DECODED),
        "third of 5": lambda: rows(run(model, call, texts[[3, 4, 0, 1, 2]], ()), 2, 5),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_site_has_the_same_bits_however_it_is_computed(backend, name, dtype, request):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, call, vocabulary = load(backend, request.getfixturevalue(name), dtype)
    texts = torch.randint(3, vocabulary, (5, LENGTH), generator=torch.Generator().manual_seed(1))

    torch.set_num_threads(1)
    plain = run(model, call, texts[:1], ())
    if dtype == torch.float32:  # with bfloat16 torch rounds most differences away, on some machines all of them
        decoded = run(model, call, texts[:1], DECODED)
        assert "returned#0" in different(decoded, plain), "no difference that the mode could remove"

    with parity_audit.invariant():
        whole = run(model, call, texts[:1], ())
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for way, compute in conditions(model, call, texts).items():
                assert not different(compute(), whole), f"{way}, {threads} threads"
        torch.set_num_threads(1)
        short = run(model, call, texts[:1, :SHORT], ())
        assert not different(run(model, call, texts[:1, :SHORT], range(1, SHORT)), short), "token by token"

    assert len(whole) > 50
    assert not different(run(model, call, texts[:1], ()), plain), "as before the mode"
    distance = float(
        (whole["returned#0"].double() - plain["returned#0"].double()).norm() / plain["returned#0"].double().norm()
    )
    assert distance <= 100 * torch.finfo(dtype).eps, "the same function, to rounding"


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
