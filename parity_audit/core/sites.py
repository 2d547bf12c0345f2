"""The names of sites: which block, which place in it, and the order in which data flow through them."""

from __future__ import annotations

LOGITS = "logits"
RETURNED = "returned"
"""What the call of the model returned; `logits` is what a hook shows of it."""
ATTENTION_SITES = (".attn_scores", ".pattern", ".hook_attn_scores", ".hook_pattern")
"""Matrices `[batch head query_pos key_pos]`, sites and hooks; everything else is `[batch pos ...]`."""
BEFORE_BLOCKS = ("embed", "pos_embed", "embed_ln.out")
AFTER_BLOCKS = ("ln_final.out", LOGITS, RETURNED)
BLOCK_ORDER = (
    "resid_pre", "ln1.out", "q_latent", "q_latent_norm.out", "kv_latent", "kv_latent_norm.out", "q", "k", "v", "attn_gate",
    "q_norm.out", "k_norm.out", "rot_q", "rot_k", "attn_scores", "pattern", "z", "delta.q", "delta.k", "delta.v", "delta.z",
    "delta.b", "delta.a", "delta.out", "z_gated", "attn_proj", "ln1_post.out", "attn_out", "resid_mid", "ln2.out",
    "mlp.router_logits", "mlp.router_weights", "mlp.pre", "mlp.pre_linear", "mlp.post", "mlp_proj", "ln2_post.out", "mlp_out",
    "per_layer.out", "resid_post",
)  # fmt: skip


def layer_of(site: str) -> int | None:
    """The block of a site, None for embed, ln_final and logits."""
    return int(site.split(".")[1]) if site.startswith("blocks.") else None


def local_name(site: str) -> str:
    """The name of a site inside its block; outside the blocks its whole name."""
    return site.split(".", 2)[2] if site.startswith("blocks.") else site


def site_order(site: str) -> tuple[int, int]:
    """Sort key that follows the data through the model."""
    layer, name = layer_of(site), local_name(site)
    if layer is None:
        if site in BEFORE_BLOCKS:
            return -1, BEFORE_BLOCKS.index(site)
        return 1 << 30, AFTER_BLOCKS.index(site) if site in AFTER_BLOCKS else 0
    return layer, BLOCK_ORDER.index(name) if name in BLOCK_ORDER else len(BLOCK_ORDER)
