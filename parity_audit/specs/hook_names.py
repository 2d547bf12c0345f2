"""The TransformerLens hooks of a model, by the names that users type, and the value that each name promises.

Sites are named after TransformerLens' activations, so most hooks promise the value of one site. Three hooks promise a
value that is no site but can be computed from sites:

    ln.hook_scale       sqrt(mean x^2 + eps) of the norm's input x (LayerNorm: of x minus its mean)    [batch pos 1]
    ln.hook_normalized  x divided by that scale, before weight and bias                                [batch pos d_model]
    attn.hook_result    z of each head times its own part of W_O; exists with `use_attn_result`        [batch pos head d_model]

Three names may mean either of two values, and a hook is correct if it gives one of them: `hook_embed` is before or
after a norm of the embedding, `hook_z` before or after a gate on the attention output, and `hook_result` before or
after a multiplier on the attention output that is added to the residual stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parity_audit.core.sites import NORM_ROLES, local_name
from parity_audit.core.types import SiteTap
from parity_audit.formulas.norms import AFTER_ROTATION
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import knob_values, taps

WITH_HOOKS = ("hooked_transformer", "transformer_bridge")
"""The backends in which users address activations by hook names."""
VALUE, SCALE, NORMALIZED, RESULT, ADDED_RESULT = "value", "scale", "normalized", "result", "added result"
NAMES = {
    "embed": "hook_embed",
    "pos_embed": "hook_pos_embed",
    "resid_pre": "hook_resid_pre",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "rot_q": "attn.hook_rot_q",
    "rot_k": "attn.hook_rot_k",
    "attn_scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp.pre": "mlp.hook_pre",
    "mlp.pre_linear": "mlp.hook_pre_linear",
    "mlp.post": "mlp.hook_post",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}
"""Site -> the hook that promises its value."""
BETWEEN = ("rot_q", "rot_k")
"""Sites whose hooks are left out if a norm of queries and keys follows the rotation: the hook is then between rotation
and norm, but the site is after the norm."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A hook point: its full name, the site that it belongs to, and the value that it promises.

    `promises` is `VALUE`, `SCALE`, `NORMALIZED`, `RESULT` or `ADDED_RESULT`.
    """

    name: str
    site: str
    promises: str
    tap: SiteTap


def hooks(spec: Spec, backend_key: str, config: Mapping[str, Any], release: str) -> tuple[Hook, ...]:
    """Return every hook that this model may have; a hook whose name has two meanings is returned once for each.

    Empty for backends without hook names.
    """
    if backend_key not in WITH_HOOKS:
        return ()
    own = {tap.site: tap for tap in taps(spec, backend_key, config, release)}
    sites = dict.fromkeys([*(tap.site for tap in taps(spec, "hf", config, "")), *own])
    order = knob_values(spec, config).get("qk_norm.order")
    between = BETWEEN if order is not None and order.value == AFTER_ROTATION else ()
    named = (site for site in sites if local_name(site) not in between)
    return tuple(hook for site in named for hook in _of_site(site, own.get(site), sites))


def _of_site(site: str, own: SiteTap | None, sites: Collection[str]) -> Iterator[Hook]:
    local = local_name(site)
    block = site.removesuffix(local)
    if local in NAMES:
        yield _hook(block + NAMES[local], site, VALUE, own)
    if local == "embed_ln.out":
        yield _hook(NAMES["embed"], site, VALUE, own)
    if local == "z_gated":
        yield _hook(block + NAMES["z"], site, VALUE, own)
    if local == ("z_gated" if f"{block}z_gated" in sites else "z"):
        yield from (_hook(f"{block}attn.hook_result", site, promise, own) for promise in (RESULT, ADDED_RESULT))
    if local in NORM_ROLES and own is not None:
        norm = own.module.removesuffix(".hook_out")
        yield _hook(f"{norm}.hook_scale", site, SCALE, own)
        yield _hook(f"{norm}.hook_normalized", site, NORMALIZED, own)


def _hook(name: str, site: str, promises: str, own: SiteTap | None) -> Hook:
    tap = SiteTap(site=name, module=name, take="hook")
    if own is not None and promises == VALUE:
        tap = dataclasses.replace(tap, layout=own.layout, sizes=own.sizes)
    return Hook(name=name, site=site, promises=promises, tap=tap)
