"""Run in a process of its own with TRITON_INTERPRET=1: the kernels for CUDA on tensors of the CPU; prints what it found as JSON.

The interpreter multiplies tiles with numpy, whose bits may depend on the place of a row in a tile, which those of a device do
not; so each row of a tile is multiplied by itself here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from batch_invariant.every_site import different, rows, run
from torch import Tensor

import parity_audit
from parity_audit.batch_invariant import composites, context
from parity_audit.batch_invariant.cuda import split_attention
from parity_audit.batch_invariant.elementwise import FUNCTIONS

COUNTS = (1, 5, 33)
WIDTH, KEYS, LENGTH = 70, 260, 11
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_matmul = np.matmul


def row_by_row(left: Any, right: Any, **kwargs: Any) -> Any:
    return np.concatenate([_matmul(row[None], right, **kwargs) for row in left])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def functions(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of rows `[row, WIDTH]`; parameters follow the dtype of the rows."""
    weight, bias = randn(40, WIDTH, dtype=dtype, seed=1), randn(WIDTH, dtype=dtype, seed=2)
    batch = randn(3, WIDTH, 8, dtype=dtype, seed=3)
    return {
        "linear": lambda x: F.linear(x, weight.to(x.dtype), bias[:40].to(x.dtype)),
        "matmul": lambda x: x @ weight.to(x.dtype).T.contiguous(),
        "einsum": lambda x: torch.einsum("bd,hdk->bhk", x, batch.to(x.dtype)),
        "mv": lambda x: torch.mv(x, bias.to(x.dtype)),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "mean": lambda x: x.mean(-1),
        "sum": lambda x: x.sum(-1),
        "rms_norm": lambda x: torch.ops.aten._fused_rms_norm(x, [WIDTH], bias.to(x.dtype), 1e-6)[0],
        "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), bias.to(x.dtype), bias.to(x.dtype)),
    }


def row_functions(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Each function: its error in units of the dtype, and whether the first row is the same at every count and last place."""
    values = randn(max(COUNTS), WIDTH, dtype=dtype)
    expected = {name: function(values[:5].double()) for name, function in functions(dtype).items()}
    found = {}
    with parity_audit.invariant():
        for name, function in functions(dtype).items():
            alone = function(values[:1].clone())[0]
            same = all(
                torch.equal(function(values[:count].clone())[0], alone)
                and torch.equal(function(values[:count].flip(0))[-1], alone)
                for count in COUNTS
            )
            found[f"{name}, {dtype}"] = {"same": same, "error": error(function(values[:5]), expected[name])}
    return found


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the last place of the largest number."""
    unit = torch.finfo(found.dtype).eps * max(1.0, float(expected.abs().max()))
    return float((found.double() - expected).abs().max()) / unit


def attention(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Attention in one piece, and its last queries with as many keys as they see, alone and in a batch, across a split."""
    q, k, v = (randn(2, 1, KEYS, 24, dtype=dtype, seed=seed) for seed in range(3))
    later = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    expected = (q.double() @ k.double().mT / math.sqrt(24)).masked_fill(later, -math.inf).softmax(-1) @ v.double()
    with parity_audit.invariant():
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        same = True
        for stop in (1, 256, 257, KEYS):
            keys, values = k[1:, :, :stop], v[1:, :, :stop]
            step = F.scaled_dot_product_attention(q[1:, :, stop - 1 : stop], keys, values)
            chunk = F.scaled_dot_product_attention(
                q[1:, :, max(0, stop - 3) : stop], keys, values, attn_mask=~later[max(0, stop - 3) : stop, :stop]
            )
            same = same and torch.equal(step, whole[1:, :, stop - 1 : stop])
            same = same and torch.equal(chunk, whole[1:, :, max(0, stop - 3) : stop])
    return {f"attention, {dtype}": {"same": same, "error": error(whole, expected)}}


def arguments_of_attention() -> float:
    """The largest difference to torch's own attention over masks, scales and groups of heads, and of its gradients."""
    q, k, v = (
        randn(2, heads, 20, width, dtype=torch.float32, seed=heads + width)
        for heads, width in ((2, 16), (1, 16), (1, 24))
    )
    mask = randn(2, 1, 20, 20, dtype=torch.float32, seed=9)
    allowed = mask > 0
    allowed[0, :, 4] = False  # a query without keys: zeros
    worst = 0.0
    for given in (
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": allowed},
        {"attn_mask": mask[0, 0], "scale": 0.3},
    ):
        results = []
        for mode in (None, parity_audit.invariant):
            inputs = [one.clone().requires_grad_() for one in (q, k, v)]
            if mode is None:
                out = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **given)
                out.square().sum().backward()
            else:
                with mode():
                    out = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **given)
                    out.square().sum().backward()
            results.append([out.detach(), *(one.grad for one in inputs)])
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*results, strict=True)))
    return worst


def model(dtype: torch.dtype) -> dict[str, Any]:
    """A tiny Llama: conditions in which a site has other bits than in one piece, and the number of sites."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=53,
        initializer_range=0.2,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).to(dtype).eval()
    texts = torch.randint(53, (3, LENGTH), generator=torch.Generator().manual_seed(0))

    def call(tokens: Tensor, cache: Any) -> Tensor:
        return llama(tokens, past_key_values=cache, use_cache=cache is not None).logits

    plain = run(llama, call, texts[:1], ())
    with parity_audit.invariant():
        whole = run(llama, call, texts[:1], ())
        ways = {
            "decoded": run(llama, call, texts[:1], range(LENGTH - 3, LENGTH)),
            "chunks, last of 2": rows(run(llama, call, texts[[1, 0]], (5, 8)), 1, 2),
            "second of 3": rows(run(llama, call, texts[[1, 0, 2]], ()), 1, 3),
        }
        other = [way for way, sites in ways.items() if different(sites, whole)]
    distance = (whole["returned#0"].double() - plain["returned#0"].double()).norm() / plain[
        "returned#0"
    ].double().norm()
    return {"other": other, "sites": len(whole), "distance": float(distance) / torch.finfo(dtype).eps}


def refused() -> dict[str, str]:
    """Codes of the errors that operations without a kernel raise, empty where they raise none."""
    values = randn(4, 6, dtype=torch.float32)
    asked: dict[str, Callable[[], Any]] = {
        "cumsum": lambda: values.cumsum(-1), "var": lambda: values.var(-1), "norm": lambda: torch.linalg.vector_norm(values),
        "conv1d": lambda: F.conv1d(values[None], values[:, :, None].expand(4, 6, 1)[:, :4]),
        "mm.out": lambda: torch.mm(values, values.T, out=values.new_empty(4, 4)),
        "index_add": lambda: values.index_add(0, torch.tensor([0, 0]), values[:2]), "prod": lambda: values.prod(-1),
        "cumsum of whole numbers": lambda: torch.arange(6).cumsum(0),
    }  # fmt: skip
    codes = {}
    with parity_audit.invariant():
        for name, ask in asked.items():
            try:
                ask()
                codes[name] = ""
            except parity_audit.CannotRun as error:
                codes[name] = error.code
    return codes


def main() -> None:
    """The kernels of CUDA take the CPU's place in the dispatcher; functions of single numbers stay the CPU's."""
    np.matmul = row_by_row
    context.CPU = {**{name: context.CPU[name] for name in FUNCTIONS}, **context.cuda_kernels()}
    composites._needs_no_dispatch = lambda left, right: False
    composites.has_split_kernel = lambda query: query.dtype != torch.float64
    found = {
        "refused": refused(),
        "arguments": arguments_of_attention(),
        "split": split_attention.SPLIT,
        "kernels": {},
        "models": {},
    }
    for dtype in DTYPES:
        found["kernels"] |= {**row_functions(dtype), **attention(dtype)}
    for dtype in DTYPES[:2]:
        found["models"][str(dtype)] = model(dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
