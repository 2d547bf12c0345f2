# parity-audit: transformers may be imported before this file
"""transformers models that users have patched, each to compute the same by another route: what a monkey-patch, a kernel of
one's own in `AttentionInterface` or a fused module looks like to the auditor.

`load(..., patch="online_softmax")`; patches that go together are joined by `+`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

KEYS, QUERIES, WORDS = 7, 5, 100
"""Sizes of chunks that divide no probe."""
Attend = Callable[..., tuple[Tensor, None]]


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def whole_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    return tuple(y.repeat_interleave(heads // y.shape[1], dim=1) for y in (key, value))


def additive(mask: Tensor | None, scores: Tensor) -> Tensor:
    """The mask that transformers hands over, of any kind, as something to add."""
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2]).logical_not()
        return torch.zeros_like(scores).masked_fill(hidden, torch.finfo(scores.dtype).min)
    mask = mask[..., : scores.shape[-1]]
    return (
        torch.zeros_like(scores).masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else mask
    )


def prescaled_q(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    key, value = whole_heads(key, value, query.shape[1])
    scores = capped(torch.matmul(query * scaling, key.mT), more.get("softcap"))
    return ((scores + additive(mask, scores)).softmax(-1) @ value).transpose(1, 2).contiguous(), None


def online_softmax(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any
) -> Any:
    key, value = whole_heads(key, value, query.shape[1])
    hidden = additive(mask, torch.empty(*query.shape[:3], key.shape[2], dtype=query.dtype))
    top = torch.full((*query.shape[:3], 1), torch.finfo(query.dtype).min, dtype=query.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    for start in range(0, key.shape[2], KEYS):
        here = slice(start, start + KEYS)
        scores = capped(torch.matmul(query, key[:, :, here].mT) * scaling, more.get("softcap")) + hidden[..., here]
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp(), (top - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out, top = out * shrink + weights @ value[:, :, here], higher
    return (out / total).transpose(1, 2).contiguous(), None


def einsum_grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any
) -> Any:
    group = query.shape[1] // key.shape[1]
    scores = capped(
        torch.einsum("bkgqd,bksd->bkgqs", query.unflatten(1, (-1, group)), key) * scaling, more.get("softcap")
    )
    flat = scores.flatten(1, 2)
    pattern = (flat + additive(mask, flat)).softmax(-1).unflatten(1, (-1, group))
    return torch.einsum("bkgqs,bksd->bqkgd", pattern, value).flatten(2, 3), None


def loop_over_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any
) -> Any:
    key, value = whole_heads(key, value, query.shape[1])
    heads = []
    for head in range(query.shape[1]):
        scores = capped(torch.bmm(query[:, head], key[:, head].mT) * scaling, more.get("softcap"))
        hidden = additive(mask, scores[:, None])[:, 0]
        heads.append(torch.bmm((scores + hidden).softmax(-1), value[:, head]))
    return torch.stack(heads, dim=2), None


def query_chunks(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    hidden = additive(mask, torch.empty(*query.shape[:3], key.shape[2], dtype=query.dtype))
    hidden = hidden.expand(*query.shape[:2], -1, -1)
    parts = zip(query.split(QUERIES, 2), hidden.split(QUERIES, 2), strict=True)
    done = [prescaled_q(module, part, key, value, seen, scaling, **more)[0] for part, seen in parts]
    return torch.cat(done, dim=1), None


def small_mask(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    key, value = whole_heads(key, value, query.shape[1])
    scores = capped(torch.matmul(query, key.mT) * scaling, more.get("softcap"))
    hidden = additive(mask, scores) < -1.0
    return (torch.where(hidden, -1e4, scores).softmax(-1) @ value).transpose(1, 2).contiguous(), None


ATTENTION: dict[str, Attend] = {
    "prescaled_q": prescaled_q, "online_softmax": online_softmax, "einsum_grouped": einsum_grouped,
    "loop_over_heads": loop_over_heads, "query_chunks": query_chunks, "small_mask": small_mask,
}  # fmt: skip


def shifted_positions(model: nn.Module) -> None:
    """Every position one later, in queries and keys alike."""

    def later(_: nn.Module, args: Any, kwargs: Any) -> Any:
        ids = kwargs.get("position_ids")
        return args, kwargs if ids is None else {**kwargs, "position_ids": ids + 1}

    model.base_model.register_forward_pre_hook(later, with_kwargs=True)


def fused_mlp(model: nn.Module) -> None:
    """One product for gate and up; `gate_proj` and `up_proj` are not called any more."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    for module in model.modules():
        if hasattr(module, "gate_proj"):
            module.forward = types.MethodType(forward, module)


def chunked_mlp(model: nn.Module) -> None:
    """The MLP a few positions at a time."""
    for module in model.modules():
        if hasattr(module, "down_proj") or hasattr(module, "dense_4h_to_h"):
            whole = module.forward
            module.forward = lambda x, whole=whole: torch.cat([whole(part) for part in x.split(QUERIES, dim=1)], dim=1)


def float64_norms(model: nn.Module) -> None:
    """Norms in float64, back to the dtype at the end."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if eps is not None and type(module).__name__.endswith("RMSNorm"):
            offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
            module.forward = lambda x, m=module, eps=eps, offset=offset: (
                x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * (m.weight.double() + offset)
            ).to(x.dtype)  # fmt: skip
        elif isinstance(module, nn.LayerNorm):
            module.forward = lambda x, m=module: F.layer_norm(
                x.double(), m.normalized_shape, m.weight.double(), m.bias.double(), m.eps
            ).to(x.dtype)


def chunked_head(model: nn.Module) -> None:
    """The vocabulary a hundred words at a time."""
    head = model.get_output_embeddings()
    head.forward = lambda x: torch.cat([F.linear(x, part) for part in head.weight.split(WORDS)], dim=-1)


PATCHES: dict[str, Callable[[nn.Module], None]] = {
    "shifted_positions": shifted_positions, "fused_mlp": fused_mlp, "chunked_mlp": chunked_mlp,
    "float64_norms": float64_norms, "chunked_head": chunked_head,
}  # fmt: skip
NAMES = (*ATTENTION, *PATCHES, "online_softmax+float64_norms+chunked_head")


def load(model_path: str, dtype: str, device: str, patch: str = "prescaled_q") -> nn.Module:
    """The model with these patches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    for name in patch.split("+"):
        if name in ATTENTION:
            AttentionInterface.register(f"eager_{name}", ATTENTION[name])
            transformers.AttentionMaskInterface.register(f"eager_{name}", transformers.masking_utils.eager_mask)
            model.set_attn_implementation(f"eager_{name}")
        else:
            PATCHES[name](model)
    return model.to(device).eval()
