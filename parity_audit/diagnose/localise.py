"""Introduced or inherited: which component makes the error, and which only passes it on.

The judge replays a capture with every visible site replaced by the capture's own tensor, so each of its
outputs is the true value *for that capture's inputs* (see `core.wire.RunRequest.inputs`). Then

    introduced_ratio = RMSE(candidate, judge on candidate's inputs) / RMSE(reference, judge on reference's inputs)

at a site is large only where the component in front of that site is itself wrong. Where the candidate's inputs make it larger
than the reference's, the second RMSE counts as that many times as large. Of n tokens, where these are few, it counts as
sqrt(`FEW_TOKENS` / n) times as large: errors of one token share a factor, and a token may be one outlier, rounded once.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable

from parity_audit.compare.deltas import rmse_to_forced
from parity_audit.compare.floor import FEW_TOKENS, noise_ratio, real_tokens
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import limit_of
from parity_audit.core.report import SiteDelta
from parity_audit.core.sites import LEAVES_BLOCK, NORMS, PART_OF, layer_of, local_name, site_order
from parity_audit.formulas.in_delta import PARTS

InputsOf = Callable[[str], Collection[str]]
READ_NORM = ("q", "k", "v", "attn_gate", *(f"delta.{part}" for part in PARTS))
"""What is projected of the same norm: none of them stands before another."""
COMPONENT_OF = {
    "embed": "embed",
    "resid_pre": "residual",
    "resid_mid": "residual",
    "resid_post": "residual",
    **dict.fromkeys(("altup.pre", "altup.predicted", "altup.corrected", "altup.combined"), "altup"),
    **dict.fromkeys(("altup.active", "altup.activated", "altup.post"), "residual"),
    "laurel.out": "laurel",
    **dict.fromkeys(NORMS, "norm"),
    "q_norm.out": "qk_norm",
    "k_norm.out": "qk_norm",
    "q_latent_norm.out": "qk_norm",
    "kv_latent_norm.out": "qk_norm",
    "q_latent": "qkv",
    "kv_latent": "qkv",
    **dict.fromkeys(READ_NORM, "qkv"),
    "rot_q": "rope",
    "rot_k": "rope",
    "attn_scores": "scores",
    "pattern": "pattern",
    "z": "z",
    "delta.out": "delta",
    "z_gated": "z_gated",
    "attn_proj": "attn_proj",
    "attn_out": "attn_out",
    "mlp.pre": "mlp",
    "mlp.pre_linear": "mlp",
    "mlp.post": "mlp",
    "mlp.dense": "mlp",
    "mlp.routed": "mlp",
    "mlp_proj": "mlp",
    "ln2_router.out": "router_norm",
    "mlp_out": "mlp_out",
    "per_layer.out": "per_layer",
    "ln_final.out": "final_norm",
    "logits": "logits",
}


def component_of(site: str) -> str:
    """The component that produces a site."""
    name = local_name(site)
    return COMPONENT_OF.get(name, name)


@one_thread()
def introduced_ratios(
    candidate: TensorSource,
    candidate_forced: TensorSource,
    reference: TensorSource,
    reference_forced: TensorSource,
    *,
    dtype: str,
) -> dict[tuple[str, str], float]:
    """Introduced ratio by (probe, site), wherever all four captures show the site."""
    ratios: dict[tuple[str, str], float] = {}
    for probe in candidate_forced.probes:
        captures = (candidate, candidate_forced, reference, reference_forced)
        shared = set.intersection(*(set(capture.sites(probe.name)) for capture in captures))
        spread = max(1.0, FEW_TOKENS / real_tokens(probe)) ** 0.5
        for site in sorted(shared, key=site_order):
            own, rms = rmse_to_forced(candidate, candidate_forced, probe, site)
            floor, usual = rmse_to_forced(reference, reference_forced, probe, site)
            if own == own and floor == floor:
                ratios[probe.name, site] = noise_ratio(own, floor * _growth(rms, usual), rms, dtype) / spread
    return ratios


def _growth(rms: float, usual: float) -> float:
    """How many times as large as the reference's what a component makes of the candidate's inputs is, at least 1: what it
    inherits may be larger, and rounding grows with it."""
    return max(1.0, rms / usual) if usual > 0.0 else 1.0


def with_introduced(deltas: Iterable[SiteDelta], ratios: dict[tuple[str, str], float]) -> tuple[SiteDelta, ...]:
    """The same deltas with their worst introduced ratio over the replayed probes."""
    worst: dict[str, float] = {}
    for (_, site), ratio in ratios.items():
        worst[site] = max(ratio, worst.get(site, 0.0))
    return tuple(dataclasses.replace(delta, introduced_ratio=worst.get(delta.site)) for delta in deltas)


def origins(ratios: dict[tuple[str, str], float], inputs_of: InputsOf) -> dict[str, tuple[str, ...]]:
    """Every site where more error is introduced than the floor explains, with the sites that the error may come from.

    These are the site itself and what it is made of without that being shown: where a probe shows attn_out and z, an error of the
    projection between them appears at attn_out. Of several probes the one that shows most counts.
    `inputs_of`: the sites that a site is made of.
    """
    shown: dict[str, set[str]] = {}
    for probe, site in ratios:
        shown.setdefault(probe, set()).add(site)
    found: dict[str, tuple[str, ...]] = {}
    for (probe, site), ratio in ratios.items():
        if ratio > limit_of(site):
            own = (site, *_hidden_before(site, shown[probe], inputs_of))
            found[site] = min(own, found.get(site, own), key=len)
    return found


def _hidden_before(site: str, shown: set[str], inputs_of: InputsOf) -> list[str]:
    """The sites between this one and the nearest shown ones that it is made of, the nearest first."""
    hidden, ahead = [], deque([site])
    while ahead:
        made = ahead.popleft()
        new = [one for one in sorted(inputs_of(made), key=site_order) if one not in hidden]
        new = [one for one in new if one not in shown or _keeps_another(one, made, shown, inputs_of)]
        hidden += new
        ahead.extend(new)
    return hidden


def _keeps_another(site: str, made: str, shown: set[str], inputs_of: InputsOf) -> bool:
    """Whether a replay that goes on from a shown site leaves what is made of it as it was, since another tensor is read: of a part
    and its whole each has a hook of its own, and what one block hands to another beside the stream (shared keys) is kept."""
    name = local_name(site)
    whole = site.removesuffix(name) + PART_OF.get(name, name)
    is_whole = name == PART_OF.get(local_name(made))
    is_part_alone = whole not in shown and whole in inputs_of(site)
    is_handed_on = layer_of(site) not in (None, layer_of(made)) and name not in LEAVES_BLOCK
    return is_whole or is_part_alone or is_handed_on


def suspects(ratios: dict[tuple[str, str], float]) -> dict[str, set[int | None]]:
    """Components that introduce more error than the floor explains, with the layers where they do."""
    found: dict[str, set[int | None]] = {}
    for site in (site for (_, site), ratio in ratios.items() if ratio > limit_of(site)):
        found.setdefault(component_of(site), set()).add(layer_of(site))
    return found
