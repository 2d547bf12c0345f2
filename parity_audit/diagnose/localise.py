"""Separate introduced from inherited error: which component makes an error, and which only passes it on.

The judge replays a capture with every visible site replaced by the capture's own tensor, so each of its outputs is the
true value *for that capture's inputs* (see `core.wire.RunRequest.inputs`). Then

    introduced_ratio = RMSE(candidate, judge on candidate's inputs) / RMSE(reference, judge on reference's inputs)

at a site is large only if the component that computes that site is itself wrong. Two corrections lower the ratio. If
the judge's output at the site is k times as large on the candidate's inputs as on the reference's, the second RMSE is
multiplied by k, because rounding grows with the output. If the probe has only n < `FEW_TOKENS` tokens, the ratio is
divided by sqrt(`FEW_TOKENS` / n): the errors of one token share a factor, and one outlier that is rounded once may
dominate a token.
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
"""Sites that are projections of the output of the same norm: none of them is computed from another."""
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
    """The component that computes a site."""
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
    """The introduced ratio of every (probe, site) that all four captures show."""
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
    """The factor by which the judge's output is larger on the candidate's inputs than on the reference's, at least 1.

    An error that the candidate inherits may make its inputs larger, and rounding grows with them.
    """
    return max(1.0, rms / usual) if usual > 0.0 else 1.0


def with_introduced(deltas: Iterable[SiteDelta], ratios: dict[tuple[str, str], float]) -> tuple[SiteDelta, ...]:
    """The deltas, each with the largest introduced ratio of its site over the replayed probes."""
    worst: dict[str, float] = {}
    for (_, site), ratio in ratios.items():
        worst[site] = max(ratio, worst.get(site, 0.0))
    return tuple(dataclasses.replace(delta, introduced_ratio=worst.get(delta.site)) for delta in deltas)


def origins(ratios: dict[tuple[str, str], float], inputs_of: InputsOf) -> dict[str, tuple[str, ...]]:
    """Every site where more error is introduced than the floor explains, with the sites that the error may come from.

    Those are the site itself and the sites that it is computed from but that the probe does not show: if a probe shows
    attn_out and z, an error of the projection between them appears at attn_out. Of several probes, the one that leaves
    the fewest such sites counts.

    Args:
        ratios: introduced ratios by (probe, site).
        inputs_of: returns the sites that a site is computed from.
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
    """The hidden sites between this site and the nearest shown sites that it is computed from, nearest first."""
    hidden, ahead = [], deque([site])
    while ahead:
        made = ahead.popleft()
        new = [one for one in sorted(inputs_of(made), key=site_order) if one not in hidden]
        new = [one for one in new if one not in shown or _keeps_another(one, made, shown, inputs_of)]
        hidden += new
        ahead.extend(new)
    return hidden


def _keeps_another(site: str, made: str, shown: set[str], inputs_of: InputsOf) -> bool:
    """Whether replacing a shown site in a replay leaves `made` as it was, because `made` reads another tensor.

    A part and its whole have separate hooks, so replacing one of them leaves the other as it was. A tensor that one
    block hands to another beside the residual stream (shared keys) keeps its own value too.
    """
    name = local_name(site)
    whole = site.removesuffix(name) + PART_OF.get(name, name)
    is_whole = name == PART_OF.get(local_name(made))
    is_part_alone = whole not in shown and whole in inputs_of(site)
    is_handed_on = layer_of(site) not in (None, layer_of(made)) and name not in LEAVES_BLOCK
    return is_whole or is_part_alone or is_handed_on


def suspects(ratios: dict[tuple[str, str], float]) -> dict[str, set[int | None]]:
    """Components that introduce more error than the floor explains, with the layers in which they do."""
    found: dict[str, set[int | None]] = {}
    for site in (site for (_, site), ratio in ratios.items() if ratio > limit_of(site)):
        found.setdefault(component_of(site), set()).add(layer_of(site))
    return found
