"""Llama written from scratch in plain torch, as a researcher's own port might be: right, or wrong in one place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight)
    return made


class Attention(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str, config: dict) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = (
            config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        )  # fmt: skip
        self.q, self.k, self.v, self.o = (linear(weights[f"{name}.{part}_proj.weight"]) for part in "qkvo")
        self.inverse_scale = math.sqrt(self.d_head)
        self.rotated_q, self.rotated_k = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.d_head)).transpose(1, 2)

        q = self.rotated_q(rotate(split(self.q(x), self.heads), angles))
        k = self.rotated_k(rotate(split(self.k(x), self.kv_heads), angles))
        repeat = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(repeat, dim=1) for y in (k, split(self.v(x), self.kv_heads)))
        scores = (q @ k.transpose(-1, -2)) / self.inverse_scale
        pattern = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(-2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Mlp(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            linear(weights[f"{name}.{part}_proj.weight"]) for part in ("gate", "up", "down")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, weights: dict[str, Tensor], name: str, config: dict) -> None:
        super().__init__()
        eps = config["rms_norm_eps"]
        self.ln1 = Norm(weights[f"{name}.input_layernorm.weight"], eps)
        self.ln2 = Norm(weights[f"{name}.post_attention_layernorm.weight"], eps)
        self.attn, self.mlp = Attention(weights, f"{name}.self_attn", config), Mlp(weights, f"{name}.mlp")
        self.hook_mid, self.hook_mlp, self.dead_hook = nn.Identity(), nn.Identity(), False

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor) -> Tensor:
        x = self.hook_mid(x + self.attn(self.ln1(x), angles, allowed))
        out = self.mlp(self.ln2(x))
        shown = self.hook_mlp(out)
        return x + (out if self.dead_hook else shown)


class Llama(nn.Module):
    def __init__(self, weights: dict[str, Tensor], config: dict) -> None:
        super().__init__()
        embed = weights["model.embed_tokens.weight"]
        self.embed = nn.Embedding.from_pretrained(embed, freeze=False)
        names = [f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])]
        self.blocks = nn.ModuleList(Block(weights, name, config) for name in names)
        self.final = Norm(weights["model.norm.weight"], config["rms_norm_eps"])
        self.unembed = linear(weights.get("lm_head.weight", embed))
        self.register_buffer("frequencies", scaled_frequencies(config))

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        length = tokens.shape[1]
        position_ids = torch.arange(length)[None] if position_ids is None else position_ids
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        angles = position_ids[..., None].float() * self.frequencies
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles, allowed)
        return self.unembed(self.final(x))


def scaled_frequencies(config: dict) -> Tensor:
    """Llama-3 scaling of the rotary frequencies (arXiv 2407.21783, as released)."""
    base = 1.0 / config["rope_theta"] ** (torch.arange(0, config["head_dim"], 2).float() / config["head_dim"])
    scaling = config["rope_scaling"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / scaling["factor"] + smooth * base


def load(model_path: str, dtype: str, device: str, scale: float | None = None, dead_hook: bool = False) -> nn.Module:
    """The port. Faults: scores of the second block are divided by `scale`; a hook of it shows what nothing reads."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    model = Llama(load_file(Path(model_path) / "model.safetensors"), config)
    if scale is not None:
        model.blocks[1].attn.inverse_scale = scale
    model.blocks[1].dead_hook = dead_hook
    return model.to(getattr(torch, dtype))


def forgot_to_return(model_path: str, dtype: str, device: str) -> None:
    """A mistake of every first port."""
    load(model_path, dtype, device)
