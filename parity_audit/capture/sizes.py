"""Compute how many numbers a capture of a probe contains, from config and spec alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parity_audit.core.sites import ATTENTION_SITES, LOGITS, RETURNED, local_name
from parity_audit.core.types import Probe, SiteTap

STORED_BYTES, FLOAT64_BYTES = 4, 8
"""Bytes per number in a native and in a float64 capture; values of 16-bit models are stored in float32 too."""
HEADS, KV_HEADS = ("q", "rot_q", "q_norm.out", "z", "attn_gate"), ("k", "v", "rot_k", "k_norm.out")
KEYS, VALUES, PER_HEAD = ("delta.q", "delta.k"), ("delta.v", "delta.z", "delta.out"), ("delta.b", "delta.a")
"""Sites of linear attention, by width."""
INNER = ("mlp.pre", "mlp.pre_linear", "mlp.post")
ROUTER = ("mlp.router_logits", "mlp.router_weights")
STREAMS = ("altup.pre", "altup.predicted", "altup.corrected", "altup.post")
"""Sites of blocks with several residual streams."""


def numbers_of(probe: Probe, chosen: Sequence[SiteTap], sizes: Mapping[str, int]) -> int:
    """Return how many numbers these sites of one probe hold, in the positions that are kept of it."""
    rows, positions = probe.shape
    kept = len(probe.kept) or positions
    heads, values = sizes["n_heads"] * sizes["d_head"], sizes.get("n_value_heads", 0) * sizes.get("d_value", 0)
    widths = {
        **dict.fromkeys(HEADS, heads),
        **dict.fromkeys(KEYS, sizes.get("n_key_heads", 0) * sizes.get("d_key", 0)),
        **dict.fromkeys(VALUES, values),
        **dict.fromkeys(PER_HEAD, sizes.get("n_value_heads", 0)),
        "z_gated": max(heads, values),
        **dict.fromkeys(KV_HEADS, sizes["n_kv_heads"] * sizes["d_head"]),
        **dict.fromkeys(INNER, sizes["d_mlp"]),
        **dict.fromkeys(ROUTER, sizes.get("n_experts", 0)),
        **dict.fromkeys(STREAMS, sizes.get("n_streams", 1) * sizes["d_model"]),
        **dict.fromkeys((LOGITS, RETURNED), sizes["d_vocab"]),
        **dict.fromkeys((site.removeprefix(".") for site in ATTENTION_SITES), sizes["n_heads"] * positions),
    }
    return rows * kept * sum(widths.get(local_name(tap.site), sizes["d_model"]) for tap in chosen)
