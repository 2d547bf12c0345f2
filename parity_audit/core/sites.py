"""The names of sites: which block, which place in it, and the order in which data flow through them."""

from __future__ import annotations

LOGITS = "logits"
RETURNED = "returned"
"""What the call of the model returned; `logits` is what a hook shows of it."""
ATTENTION_SITES = (".attn_scores", ".pattern", ".hook_attn_scores", ".hook_pattern")
"""Matrices `[batch head query_pos key_pos]`, sites and hooks; everything else is `[batch pos ...]`."""
BEFORE_BLOCKS = ("embed", "pos_embed", "embed_ln.out")
AFTER_BLOCKS = ("altup.combined", "ln_final.out", LOGITS, RETURNED)
ENTERS_BLOCK, LEAVES_BLOCK = ("resid_pre", "altup.pre"), ("resid_post", "altup.post")
"""What goes from block to block. Where there are several streams (`[batch pos stream d_model]`, Gemma 3n), `altup.pre` and
`altup.post` are all of them, resid_pre and resid_post the active one of these; resid_mid is between attention and the MLP."""
PART_OF = {"resid_pre": "altup.pre", "altup.active": "altup.predicted", "resid_post": "altup.post"}
"""What is a part of another site, which programs show of the same tensor: the active stream of all of them."""
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
"""Those of a linear attention."""

ROTATED = ("rot_q", "rot_k")
"""Queries and keys behind the rotation."""

NORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "embed_ln.out": (("embed",), "norm.embed_ln"),
    # Where there are several streams, a block computes on what was predicted for the active one.
    "ln1.out": (("altup.active", "resid_pre"), "norm.ln1"),
    "ln1_post.out": (("attn_proj",), "norm.ln1_post"),
    # A parallel block has no resid_mid: both norms read what enters it.
    "ln2.out": (("resid_mid", "resid_pre"), "norm.ln2"),
    "ln2_experts.out": (("resid_mid",), "norm.experts"),
    "mlp.dense_post.out": (("mlp.dense",), "norm.dense_post"),
    "mlp.routed_post.out": (("mlp.routed",), "norm.routed_post"),
    "ln2_post.out": (("mlp_proj",), "norm.ln2_post"),
}
"""The norms of the residual stream but for the final one: what each reads (the first of these that is shown) and whose weight
it has, by the site that it makes."""
FINAL_NORM = "ln_final.out"
"""The final norm reads the last block's resid_post, or what several streams are combined to."""
NORM_ROLES = {**{site: role for site, (_, role) in NORMS.items()}, FINAL_NORM: "norm.final"}
"""Whose weight and bias a norm has, by the site that it makes."""


def final_norm_reads(n_layers: int) -> tuple[str, ...]:
    """What the final norm reads: the first of these that is shown."""
    return "altup.combined", f"blocks.{n_layers - 1}.resid_post"


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
