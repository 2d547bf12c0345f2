# parity-audit: transformers may be imported before this file
"""Norm weights folded into the projections behind them: `python:folded_norms.py:load`, with a fault where one is named.

row         one row of a projection of block 1 is 1.01 times what it should be
activation  the MLP has another activation
left        the MLP's first projection is the checkpoint's, although the norm before it is folded
unloaded    nothing is folded, and the norms before the MLP have the gain 1
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

NORMS = {
    "llama": (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
              ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"))),
    "gemma2": (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
               ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj"))),
    "gpt2": (("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))),
}  # fmt: skip


@torch.no_grad()
def load(model_path: str, dtype: str, device: str, fault: str = ""):
    """A transformers model whose norms have the gain 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    kind = model.config.model_type
    offset = 1.0 if kind == "gemma2" else 0.0
    blocks = model.transformer.h if kind == "gpt2" else model.model.layers
    if fault == "unloaded":
        for block in blocks:
            block.get_submodule(NORMS[kind][1][0]).weight.fill_(1.0 - offset)
        return model
    before = [block.get_submodule(NORMS[kind][1][1][0]).weight.clone() for block in blocks]
    for block in blocks:
        for norm, readers in NORMS[kind]:
            fold(block.get_submodule(norm), [block.get_submodule(name) for name in readers], offset)
    if kind != "gpt2":
        head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, dtype=model.dtype)
        head.weight.copy_(model.lm_head.weight)
        model.lm_head = head
        fold(model.model.norm, [head], offset)
    for block, weight in zip(blocks, before, strict=True):
        if fault == "left":
            block.get_submodule(NORMS[kind][1][1][0]).weight.copy_(weight)
        if fault == "activation":
            setattr(block.mlp, "act" if kind == "gpt2" else "act_fn", nn.SiLU())
    if fault == "row":
        blocks[1].get_submodule(NORMS[kind][0][1][0]).weight[3] *= 1.01
    return model


def fold(norm: nn.Module, readers: list[nn.Module], offset: float) -> None:
    """The norm's gain and bias move into the layers that read it."""
    gain, bias = norm.weight + offset, getattr(norm, "bias", None)
    for layer in readers:
        rows_are_inputs = layer.__class__.__name__ == "Conv1D"
        weight: Tensor = layer.weight.T if rows_are_inputs else layer.weight
        if bias is not None:
            layer.bias += weight @ bias
        layer.weight.copy_((weight * gain).T if rows_are_inputs else weight * gain)
    norm.weight.fill_(1.0 - offset)
    if bias is not None:
        bias.zero_()
