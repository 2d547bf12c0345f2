"""One decoder in plain torch that computes Llama, Gemma-2 and Qwen-3 by many routes, all of them right.

`load(..., route="online_softmax")` is a port that a careful person might write; routes that go together are joined by `+`.
Sites of `routes_sites.yaml` are hook points with the axes of TransformerLens; rotated queries, scores and pattern are
locals of `Attention`, found by the harness or not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

KEYS, QUERIES, WORDS = 7, 5, 100
"""Sizes of chunks that divide no probe."""

ROUTES = (
    "plain", "prescaled_q", "prescaled_both", "online_softmax", "query_chunks", "einsum", "grouped", "head_major", "bmm",
    "sdpa", "exp2", "float64_softmax", "row_by_row", "fused", "stored_transposed", "chunked_head", "chunked_mlp",
    "complex_rope", "rope_by_matrix", "float64_angles", "reordered_adds", "float64_norms", "rms_norm_of_torch",
    "mask_bool", "mask_1e9", "mask_inf", "mask_finfo_half", "mask_weights", "late_scale", "shifted_positions",
    "positions_from_padding", "q_and_k_in_another_basis", "v_before_o", "prescaled_q+mask_1e9+fused",
    "online_softmax+complex_rope+float64_norms", "shifted_positions+prescaled_q",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The constants that the three families do not share."""

    config: dict[str, Any]

    @property
    def gemma(self) -> bool:
        return self.config["model_type"] == "gemma2"

    @property
    def d_head(self) -> int:
        return self.config["head_dim"]

    @property
    def scale(self) -> float:
        return float(self.config.get("query_pre_attn_scalar", self.d_head)) ** -0.5

    @property
    def softcap(self) -> float | None:
        return self.config.get("attn_logit_softcapping")

    def window(self, layer: int) -> int | None:
        return self.config["sliding_window"] if self.gemma and layer % 2 == 0 else None

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh") if self.gemma else F.silu(x)

    def frequencies(self, dtype: torch.dtype) -> Tensor:
        """`[d_head / 2]`, with Llama-3's scaling (arXiv 2407.21783) where the config has it."""
        exponent = torch.arange(0, self.d_head, 2, dtype=torch.int64).to(dtype) / self.d_head
        base = 1.0 / self.config["rope_theta"] ** exponent
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return base
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * base / scaling["factor"] + smooth * base


class Norm(nn.Module):
    """RMSNorm; Gemma's weights are stored less one."""

    def __init__(self, weight: Tensor, shape: Shape, routes: set[str]) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), shape.config["rms_norm_eps"]
        self.offset, self.routes = float(shape.gemma), routes

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight + self.offset
        if "rms_norm_of_torch" in self.routes:
            return F.rms_norm(x, gain.shape, gain, self.eps)
        if "float64_norms" in self.routes:
            wide = x.double()
            return (wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt() * gain.double()).to(x)
        return gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Linear(nn.Module):
    """x W^T, or x W of a weight that is stored the other way round."""

    def __init__(self, weight: Tensor, routes: set[str]) -> None:
        super().__init__()
        self.transposed = "stored_transposed" in routes
        self.weight = nn.Parameter(weight.T.contiguous() if self.transposed else weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.transposed else F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str, shape: Shape, layer: int, routes: set[str]) -> None:
        super().__init__()
        self.shape, self.layer, self.routes = shape, layer, routes
        self.heads, self.kv_heads = shape.config["num_attention_heads"], shape.config["num_key_value_heads"]
        q, k, v, o = (weights[f"{name}.{part}_proj.weight"] for part in "qkvo")
        if "fused" in routes:
            self.qkv = Linear(torch.cat([q, k, v]), routes)
        else:
            self.q, self.k, self.v = Linear(q, routes), Linear(k, routes), Linear(v, routes)
        self.o = Linear(o, routes)
        norms = [weights.get(f"{name}.{part}_norm.weight") for part in "qk"]
        self.norms = nn.ModuleList(nn.Identity() if norm is None else Norm(norm, shape, routes) for norm in norms)
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (nn.Identity() for _ in range(4))
        basis = torch.linalg.qr(torch.randn(shape.d_head, shape.d_head, generator=torch.Generator().manual_seed(layer)))
        self.register_buffer("basis", basis.Q)

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        q, k = (norm(y) for norm, y in zip(self.norms, (self.hook_q(q), self.hook_k(k)), strict=True))
        q, k, v = (y.transpose(1, 2) for y in (self.rotated(q, angles), self.rotated(k, angles), self.hook_v(v)))
        if "q_and_k_in_another_basis" in self.routes:
            q, k = q @ self.basis, k @ self.basis
        window = self.shape.window(self.layer)
        if window is not None:
            near = torch.ones_like(allowed[0, 0], dtype=torch.bool).triu(1 - window)
            allowed = allowed & near
        z = self.attended(q, k, v, allowed)
        if "v_before_o" in self.routes:  # sum over heads of z_h W_h
            parts = self.hook_z(z).unbind(2)
            columns = self.o.weight.split(self.shape.d_head, dim=0 if self.o.transposed else 1)
            return sum(part @ (w if self.o.transposed else w.T) for part, w in zip(parts, columns, strict=True))
        return self.o(self.hook_z(z).flatten(-2))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as `[b p head d_head]`."""
        if "fused" in self.routes:
            d = self.shape.d_head
            parts = self.qkv(x).split([self.heads * d, self.kv_heads * d, self.kv_heads * d], dim=-1)
        else:
            parts = self.q(x), self.k(x), self.v(x)
        return tuple(part.unflatten(-1, (-1, self.shape.d_head)) for part in parts)

    def rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        """`[b p head d_head]`, component i paired with component i + d_head / 2."""
        a, b = x.chunk(2, dim=-1)
        if "complex_rope" in self.routes:
            turned = (
                torch.complex(a.contiguous(), b.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
            )
            return torch.cat([turned.real, turned.imag], dim=-1)
        cos, sin = angles.cos()[:, :, None].to(x), angles.sin()[:, :, None].to(x)
        if "rope_by_matrix" in self.routes:
            half = x.shape[-1] // 2
            swap = torch.zeros(2 * half, 2 * half, dtype=x.dtype)
            swap[:half, half:], swap[half:, :half] = torch.eye(half), -torch.eye(half)
            return x * torch.cat([cos, cos], -1) + torch.matmul(x, swap) * torch.cat([sin, sin], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """z `[b p head d_head]` of q `[b head p d_head]`, k and v `[b kv_head p d_head]`."""
        routes, group = self.routes, self.heads // self.kv_heads
        scale = self.shape.scale
        if "sdpa" in routes and self.shape.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, allowed, scale=scale, enable_gqa=True).transpose(1, 2)
        if "prescaled_q" in routes:
            q, scale = q * scale, 1.0
        if "prescaled_both" in routes:
            q, k, scale = q * scale**0.5, k * scale**0.5, 1.0
        if "grouped" in routes:
            scores = torch.einsum("bkgqd,bksd->bkgqs", q.unflatten(1, (-1, group)), k)
            pattern = self.softmax(self.masked(self.capped(scores * scale), allowed[:, :, None]), allowed[:, :, None])
            return torch.einsum("bkgqs,bksd->bqkgd", pattern, v).flatten(2, 3)
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        if "online_softmax" in routes:
            return self.online(q, k, v, allowed, scale).transpose(1, 2)
        if "query_chunks" in routes:
            parts = zip(q.split(QUERIES, 2), allowed.expand(len(q), 1, -1, -1).split(QUERIES, 2), strict=True)
            return torch.cat([self.core(part, k, v, seen, scale) for part, seen in parts], dim=2).transpose(1, 2)
        if "row_by_row" in routes:
            seen = allowed.expand(len(q), 1, -1, -1)
            rows = [self.core(q[[i]], k[[i]], v[[i]], seen[[i]], scale) for i in range(len(q))]
            return torch.cat(rows).transpose(1, 2)
        if "head_major" in routes:
            q, k, v = (y.transpose(0, 1).contiguous() for y in (q, k, v))
            return self.core(q, k, v, allowed.transpose(0, 1), scale).permute(1, 2, 0, 3)
        return self.core(q, k, v, allowed, scale).transpose(1, 2)

    def core(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
        if "einsum" in self.routes:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
            return torch.einsum("bhqk,bhkd->bhqd", self.softmax(self.masked(self.capped(scores), allowed), allowed), v)
        if "bmm" in self.routes:
            flat = [y.flatten(0, 1) for y in (q, k, v)]
            empty = torch.empty(len(flat[0]), q.shape[2], k.shape[2])
            scores = torch.baddbmm(empty, flat[0], flat[1].mT, beta=0.0, alpha=scale).unflatten(0, q.shape[:2])
            pattern = self.softmax(self.masked(self.capped(scores), allowed), allowed)
            return torch.bmm(pattern.flatten(0, 1), flat[2]).unflatten(0, q.shape[:2])
        scores = self.capped(q @ k.mT * scale)
        if "late_scale" in self.routes and self.shape.softcap is None:  # the mask before the scale
            scores = self.masked(q @ k.mT, allowed) * scale
            return self.softmax(scores, allowed) @ v
        return self.softmax(self.masked(scores, allowed), allowed) @ v

    def capped(self, scores: Tensor) -> Tensor:
        cap = self.shape.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def masked(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Hidden scores at the lowest number, or at others that leave nothing of them after a softmax."""
        if "mask_weights" in self.routes:
            return scores
        low = torch.finfo(scores.dtype).min
        if "mask_1e9" in self.routes:
            return scores + (1.0 - allowed.to(scores)) * -1e9
        if "mask_bool" in self.routes:
            return torch.where(allowed, scores, low)
        if "mask_inf" in self.routes:  # rows of padding see themselves, for a row without any key is not a number
            itself = (
                torch.eye(allowed.shape[-1], dtype=torch.bool) if allowed.shape[-2] == allowed.shape[-1] else allowed
            )
            return scores.masked_fill(~(allowed | (itself & ~allowed.any(-1, keepdim=True))), -torch.inf)
        if "mask_finfo_half" in self.routes:
            return scores + torch.zeros_like(scores).masked_fill(~allowed, low / 2)
        return scores.masked_fill(~allowed, low)

    def softmax(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if "mask_weights" in self.routes:  # weights of hidden keys are set to zero before they are normalised
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * allowed
            return weights / weights.sum(-1, keepdim=True).clamp_min(1e-38)
        if "exp2" in self.routes:
            weights = torch.exp2((scores - scores.amax(-1, keepdim=True)) * math.log2(math.e))
            return weights / weights.sum(-1, keepdim=True)
        return scores.double().softmax(-1).to(scores) if "float64_softmax" in self.routes else scores.softmax(-1)

    def online(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
        """Keys in chunks, with a running maximum and a running sum."""
        top = torch.full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for start in range(0, k.shape[2], KEYS):
            here = slice(start, start + KEYS)
            scores = self.masked(
                self.capped(torch.einsum("bhqd,bhkd->bhqk", q, k[:, :, here]) * scale), allowed[..., here]
            )
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - higher).exp(), (top - higher).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + torch.einsum("bhqk,bhkd->bhqd", weights, v[:, :, here])
            top = higher
        return out / total


class Mlp(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str, shape: Shape, routes: set[str]) -> None:
        super().__init__()
        self.shape, self.routes = shape, routes
        gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        if "fused" in routes:
            self.gate_up = Linear(torch.cat([gate, up]), routes)
        else:
            self.gate, self.up = Linear(gate, routes), Linear(up, routes)
        self.down = Linear(down, routes)

    def forward(self, x: Tensor) -> Tensor:
        if "chunked_mlp" in self.routes:
            return torch.cat([self.part(piece) for piece in x.split(QUERIES, dim=1)], dim=1)
        return self.part(x)

    def part(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if "fused" in self.routes else (self.gate(x), self.up(x))
        return self.down(self.shape.activation(gate) * up)


class Block(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str, shape: Shape, layer: int, routes: set[str]) -> None:
        super().__init__()

        def norm(part: str) -> Norm:
            return Norm(weights[f"{name}.{part}_layernorm.weight"], shape, routes)

        self.routes = routes
        self.ln1 = norm("input")
        self.ln1_post = norm("post_attention") if shape.gemma else nn.Identity()
        self.ln2 = norm("pre_feedforward" if shape.gemma else "post_attention")
        self.ln2_post = norm("post_feedforward") if shape.gemma else nn.Identity()
        self.attn, self.mlp = (
            Attention(weights, f"{name}.self_attn", shape, layer, routes),
            Mlp(weights, f"{name}.mlp", shape, routes),
        )

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor) -> Tensor:
        attn = self.ln1_post(self.attn(self.ln1(x), angles, allowed))
        if "reordered_adds" in self.routes:
            mlp = self.ln2_post(self.mlp(self.ln2(torch.add(attn, x))))
            return (mlp + attn) + x
        mid = x + attn
        return mid + self.ln2_post(self.mlp(self.ln2(mid)))


class Decoder(nn.Module):
    def __init__(self, weights: dict[str, Tensor], shape: Shape, routes: set[str]) -> None:
        super().__init__()
        self.shape, self.routes = shape, routes
        embed = weights["model.embed_tokens.weight"]
        self.embed, self.hook_embed = nn.Embedding.from_pretrained(embed, freeze=False), nn.Identity()
        layers = range(shape.config["num_hidden_layers"])
        self.blocks = nn.ModuleList(Block(weights, f"model.layers.{n}", shape, n, routes) for n in layers)
        self.final = Norm(weights["model.norm.weight"], shape, routes)
        self.head = nn.Parameter(weights.get("lm_head.weight", embed))

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        length = tokens.shape[1]
        places = torch.arange(length)[None]
        if position_ids is not None and "positions_from_padding" not in self.routes:
            places = position_ids
        if "shifted_positions" in self.routes:
            places = places + 1
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        wide = torch.float64 if "float64_angles" in self.routes else torch.float32
        angles = places[..., None].to(wide) * self.shape.frequencies(torch.float32).to(wide)
        size = torch.tensor(self.shape.config["hidden_size"] ** 0.5, dtype=self.head.dtype)
        x = self.hook_embed(self.embed(tokens) * size if self.shape.gemma else self.embed(tokens))
        for block in self.blocks:
            x = block(x, angles, allowed)
        return self.logits(self.final(x))

    def logits(self, x: Tensor) -> Tensor:
        if "chunked_head" in self.routes:
            out = torch.cat([F.linear(x, part) for part in self.head.split(WORDS)], dim=-1)
        else:
            out = F.linear(x, self.head)
        cap = self.shape.config.get("final_logit_softcapping")
        return out if cap is None else cap * torch.tanh(out / cap)


def load(
    model_path: str, dtype: str, device: str, route: str = "plain", eps: float | None = None, scale: float | None = None
) -> nn.Module:
    """The port that takes a route, or several joined by `+`. Faults: `eps` of every norm; scores divided by `scale`."""
    routes = set(route.split("+"))
    known = {name for joined in ROUTES for name in joined.split("+")}
    if routes - known:
        raise ValueError(f"no such route: {sorted(routes - known)}")
    folder = Path(model_path)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {} if eps is None else {"rms_norm_eps": eps}
    config |= {} if scale is None else {"query_pre_attn_scalar": scale**2}
    return Decoder(weights, Shape(config), routes).to(getattr(torch, dtype))
