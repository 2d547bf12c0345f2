"""Convert the constants in a TransformerLens config, which has field names of its own, to knob values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity_audit.specs.expr import evaluate

FIELDS: dict[str, tuple[str, str]] = {
    "attention.scale": ("attn_scale", "attn_scale if use_attn_scale else 1.0"),
    "attention.softcap": ("attn_scores_soft_cap", "null if config['attn_scores_soft_cap'] == null else "
                          "(attn_scores_soft_cap if attn_scores_soft_cap > 0 else null)"),
    "logits.softcap": ("output_logits_soft_cap", "null if config['output_logits_soft_cap'] == null else "
                       "(output_logits_soft_cap if output_logits_soft_cap > 0 else null)"),
    "norm.eps": ("eps", "eps"),
    "norm.kind": ("normalization_type", "'rms' if normalization_type == 'RMS' or normalization_type == 'RMSPre' else 'layer'"),
    "n_kv_heads": ("n_key_value_heads", "n_key_value_heads or n_heads"),
    "mlp.activation": ("act_fn", "act_fn"),
    "rope.pairing": ("rotary_adjacent_pairs", "'adjacent' if config['rotary_adjacent_pairs'] else 'half'"),
    "rope.partial": ("rotary_dim", "rotary_dim"),
    "residual.parallel": ("parallel_attn_mlp", "parallel_attn_mlp"),
    "moe.top_k": ("experts_per_token", "experts_per_token"),
}  # fmt: skip
"""By knob: the config field that sets it, and the expression that computes its value from the fields."""
WINDOW, THETA, SCALING = "attention.window", "rope.theta", "rope.scaling"
SCALED_BY_LAYER = "scale_attn_by_inverse_layer_idx"
"""The config field that makes the modules multiply their attention scale by the layer number + 1."""
UNSET = -1.0
"""Value of `attn_scale` in a config that leaves the scale to the modules."""
LLAMA_3_CONTEXT = 8192
"""The original context length for the release's RoPE scaling; later releases have a field for it."""


def knobs_of(fields: Mapping[str, Any], n_layers: int) -> dict[str, tuple[str, Any]]:
    """The (field, value) of every knob that a HookedTransformerConfig sets, with one value or one per layer."""
    names = {**fields, "config": fields, "null": None, "true": True, "false": False}
    found = {knob: (field, evaluate(text, names)) for knob, (field, text) in FIELDS.items() if field in fields}
    if fields.get("attn_scale") == UNSET:
        del found["attention.scale"]
    elif fields.get(SCALED_BY_LAYER):
        field, scale = found["attention.scale"]
        found["attention.scale"] = (f"{field}, {SCALED_BY_LAYER}", [scale * (layer + 1) for layer in range(n_layers)])
    found[WINDOW] = ("window_size, attn_types", _windows(fields, n_layers))
    if fields.get("positional_embedding_type", "rotary") == "rotary":
        found[THETA] = ("rotary_base", _bases(fields, n_layers))
        found[SCALING] = ("use_NTK_by_parts_rope", _scaling(fields))
    else:
        found.pop("rope.partial", None)
        found.pop("rope.pairing", None)
    return found


def _windows(fields: Mapping[str, Any], n_layers: int) -> list[int | None]:
    """The window of each layer; None in layers with global attention."""
    if not fields.get("use_local_attn"):
        return [None] * n_layers
    kinds = list(fields.get("attn_types") or ["local"] * n_layers)[:n_layers]
    return [fields.get("window_size") if kind == "local" else None for kind in kinds]


def _bases(fields: Mapping[str, Any], n_layers: int) -> list[float]:
    """The rotary base of each layer; layers with a window may have a base of their own."""
    base, local = fields.get("rotary_base", 10000), fields.get("rotary_base_local")
    windows = _windows(fields, n_layers)
    return [float(base if local is None or window is None else local) for window in windows]


def _scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The RoPE scaling in the config; it has only one kind, by parts of the spectrum as in Llama 3."""
    if not fields.get("use_NTK_by_parts_rope"):
        return None
    return {
        "rope_type": "llama3", "factor": fields["NTK_by_parts_factor"],
        "low_freq_factor": fields["NTK_by_parts_low_freq_factor"],
        "high_freq_factor": fields["NTK_by_parts_high_freq_factor"],
        "original_max_position_embeddings": fields.get("NTK_original_ctx_len", LLAMA_3_CONTEXT),
    }  # fmt: skip
