"""The names of sites: the block, the place in the block, and the order of the data flow."""

from __future__ import annotations

LOGITS = "logits"
RETURNED = "returned"
"""The logits that the call of the model returned; the site `logits` is what a hook shows of them."""
ATTENTION_SITES = (".attn_scores", ".pattern", ".hook_attn_scores", ".hook_pattern")
"""Ends of the names of sites and hooks that are matrices `[batch head query_pos key_pos]`; all others are `[batch
pos ...]`."""
BEFORE_BLOCKS = ("embed", "pos_embed", "embed_ln.out")
AFTER_BLOCKS = ("altup.combined", "ln_final.out", LOGITS, RETURNED)
ENTERS_BLOCK, LEAVES_BLOCK = ("resid_pre", "altup.pre"), ("resid_post", "altup.post")
"""The sites at which the stream enters and leaves a block. In models with several streams (`[batch pos stream
d_model]`, Gemma 3n), `altup.pre` and `altup.post` are all of them, and resid_pre and resid_post are the active one;
resid_mid is between attention and the MLP."""
PART_OF = {"resid_pre": "altup.pre", "altup.active": "altup.predicted", "resid_post": "altup.post"}
"""Sites that are a part of another site, which programs show by the same tensor: the active stream, out of all
streams."""
BLOCK_ORDER = (
    "resid_pre", "altup.pre", "altup.predicted", "altup.active", "ln1.out", "laurel.out",
    "q_latent", "q_latent_norm.out", "kv_latent", "kv_latent_norm.out", "q", "k", "v", "attn_gate",
    "q_norm.out", "k_norm.out", "rot_q", "rot_k", "attn_scores", "pattern", "z", "delta.q", "delta.k", "delta.v", "delta.z",
    "delta.b", "delta.a", "delta.out", "z_gated", "attn_proj", "ln1_post.out", "attn_out", "resid_mid", "ln2.out",
    "mlp.pre", "mlp.pre_linear", "mlp.post", "mlp.dense", "mlp.dense_post.out", "ln2_router.out", "mlp.router_logits",
    "mlp.router_weights", "ln2_experts.out", "mlp.routed", "mlp.routed_post.out", "mlp_proj", "ln2_post.out", "mlp_out",
    "altup.activated", "altup.corrected", "per_layer.out", "altup.post", "resid_post",
)  # fmt: skip
DELTA_SITES = tuple(site for site in BLOCK_ORDER if site.startswith("delta."))
"""The sites of a linear attention."""

ROTATED = ("rot_q", "rot_k")
"""Queries and keys after the rotation."""

NORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "embed_ln.out": (("embed",), "norm.embed_ln"),
    # In models with several streams, a block works on the prediction for the active one.
    "ln1.out": (("altup.active", "resid_pre"), "norm.ln1"),
    "ln1_post.out": (("attn_proj",), "norm.ln1_post"),
    # A parallel block has no resid_mid: both of its norms read its input.
    "ln2.out": (("resid_mid", "resid_pre"), "norm.ln2"),
    "ln2_experts.out": (("resid_mid",), "norm.experts"),
    "mlp.dense_post.out": (("mlp.dense",), "norm.dense_post"),
    "mlp.routed_post.out": (("mlp.routed",), "norm.routed_post"),
    "ln2_post.out": (("mlp_proj",), "norm.ln2_post"),
}
"""The norms of the residual stream, without the final one. For each output site: the sites that the norm may read
(the first that is visible counts), and the role of its weight."""
FINAL_NORM = "ln_final.out"
"""The final norm, which reads the last block's resid_post, or the combination of several streams."""
NORM_ROLES = {**{site: role for site, (_, role) in NORMS.items()}, FINAL_NORM: "norm.final"}
"""The role of a norm's weight and bias, by the site of its output."""


def final_norm_reads(n_layers: int) -> tuple[str, ...]:
    """Return the sites that the final norm may read; the first that is visible counts."""
    return "altup.combined", f"blocks.{n_layers - 1}.resid_post"


def layer_of(site: str) -> int | None:
    """Return the block of a site; None outside the blocks (embed, ln_final, logits)."""
    return int(site.split(".")[1]) if site.startswith("blocks.") else None


def local_name(site: str) -> str:
    """Return the name of a site within its block; outside the blocks, its full name."""
    return site.split(".", 2)[2] if site.startswith("blocks.") else site


def site_order(site: str) -> tuple[int, int]:
    """Return a sort key that follows the data flow through the model."""
    layer, name = layer_of(site), local_name(site)
    if layer is None:
        if site in BEFORE_BLOCKS:
            return -1, BEFORE_BLOCKS.index(site)
        return 1 << 30, AFTER_BLOCKS.index(site) if site in AFTER_BLOCKS else 0
    return layer, BLOCK_ORDER.index(name) if name in BLOCK_ORDER else len(BLOCK_ORDER)
