# parity-audit: transformers may be imported before this file
"""transformers with one constant moved in one layer alone: `layer`, and `eps` or `scale` as the amount to add."""

import torch
import transformers


def load(model_path, dtype, device, layer=0, eps=0.0, scale=0.0):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    block = model.model.layers[layer]
    block.self_attn.scaling = 1.0 / (1.0 / block.self_attn.scaling + scale)
    for norm in (module for module in block.children() if hasattr(module, "weight")):
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        setattr(norm, name, getattr(norm, name) + eps)
    return model.to(device).eval()
