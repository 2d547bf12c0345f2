# parity-audit: transformers may be imported before this file
"""A mixture whose routers prefer later experts where scores tie: `python:other_experts.py:load`, with one token sent to an expert
that does not tie (`fault=True`), or with another eps (`eps=1e-3`)."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm


def load(model_path: str, dtype: str, device: str, fault: bool = False, eps: float | None = None):
    """A transformers model with other routers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    for number, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(prefer_later)
        if fault and number == 1:
            block.mlp.gate.register_forward_hook(take_the_next)
    for module in model.modules() if eps is not None else ():
        if isinstance(module, Qwen3MoeRMSNorm):
            module.variance_epsilon = eps
    return model


def prefer_later(router: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The largest logits, of equal ones the later."""
    logits, _, chosen = out
    return (logits, *ranked(logits, chosen.shape[-1]))


def take_the_next(router: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One token goes to the expert behind the last that it should go to."""
    logits, _, chosen = out
    count = chosen.shape[-1]
    _, more = ranked(logits, count + 3)
    apart = logits.gather(-1, more[:, count - 1 :]).diff(dim=-1).abs()[:, -1]
    token = int(apart.argmax())
    chosen = chosen.clone()
    chosen[token, -1] = more[token, -1]
    kept = logits.gather(-1, chosen)
    return logits, kept.softmax(-1), chosen


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Renormalised weights and numbers `[token count]` of the experts of the largest logits."""
    values, reverse = logits.flip(-1).topk(count, -1)
    return values.softmax(-1), logits.shape[-1] - 1 - reverse
