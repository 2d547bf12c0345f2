"""The norms of q and k: there or not, before or after rotation, per head or over the whole projection.

    per head           out_h = W_(h) q_h / sqrt(mean over d_head of q_h^2 + eps)
    whole projection   out   = W q / sqrt(mean over all heads of q^2 + eps)

`shape` is fitted with one gain per token and with one per token and head; the first explains the second kind of
norm only. A rotation R in front turns pairs of components, so no weight per component explains the output, but
W^-1 out = g R q keeps the length of q in every pair.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, relative_rms
from parity_audit.diagnose.identify.norm.family import fit_norm, tokens_of
from parity_audit.diagnose.identify.norm.shape import FLOOR, Norm, Shape, best_shape
from parity_audit.diagnose.identify.norm.weight import ANOTHER, OWN, whose_bias, whose_weight
from parity_audit.diagnose.thresholds import CLEAR, EXPLAINED

PRESENT, AXIS, ORDER = "qk_norm.present", "qk_norm.axis", "qk_norm.order"
HEAD, WHOLE = "head", "projection"
BEFORE, AFTER = "before rotation", "after rotation"
TOKENS = 96
SAME = 1e-6


def fit(evidence: Evidence) -> list[Outcome]:
    """The knobs of both norms; nothing where the model has none."""
    if evidence.layer is None:
        return []
    return [outcome for which in ("q", "k") for outcome in _fit_one(evidence, which)]


def _fit_one(evidence: Evidence, which: str) -> list[Outcome]:
    site = f"{which}_norm.out"
    tokens = tokens_of(evidence, which, site, TOKENS)
    if tokens is None:
        known = evidence.weight(f"norm.{which}") is not None
        return [gap(evidence, PRESENT, f"{site} is not visible")] if known else []
    x, out = tokens
    norm = Norm(prefix="qk_norm", site=site, x=x, out=out, w=_weight(evidence, f"norm.{which}", x),
                b=_weight(evidence, f"norm.{which}.bias", x))  # fmt: skip
    if relative_rms(out - x, x) < SAME:
        return _elsewhere(evidence, norm, which) or [_word(evidence, norm, PRESENT, "missing", 0.0)]
    axes = axes_of(norm)
    chosen = min(axes, key=lambda axis: axes[axis][1][0].left)
    left = axes[chosen][1][0].left
    if left > EXPLAINED:
        return _after_rotation(evidence, norm, left)
    alike = _even(norm) <= CLEAR * max(left, FLOOR)
    if alike:
        chosen = HEAD if norm.w is None or bool((norm.w == norm.w[:1]).all()) else WHOLE
    elif axes[WHOLE][1][0].left <= CLEAR * max(left, FLOOR) and _foreign(*axes[WHOLE]) <= _foreign(*axes[HEAD]):
        chosen = WHOLE  # heads apart have more freedom: they never leave more
    outcomes: list[Outcome] = [
        _word(evidence, norm, PRESENT, "present", left), _word(evidence, norm, ORDER, BEFORE, left)
    ]  # fmt: skip
    if x.shape[1] > 1:
        why = f"each head has the same share of the length of {which} in every token"
        outcomes.append(gap(evidence, AXIS, why) if alike else _word(evidence, norm, AXIS, chosen, left))
    return outcomes + fit_norm(evidence, axes[chosen][0], {}, axes[chosen][1])


def axes_of(norm: Norm) -> dict[str, tuple[Norm, tuple[Shape, bool]]]:
    """The norm with heads apart and as one vector, and the best shape of each."""
    whole = dataclasses.replace(
        norm, x=norm.x.flatten(1)[:, None], out=norm.out.flatten(1)[:, None],
        w=None if norm.w is None else norm.w.reshape(1, -1), b=None if norm.b is None else norm.b.reshape(1, -1),
    )  # fmt: skip
    return {axis: (own, best_shape(own)) for axis, own in ((HEAD, norm), (WHOLE, whole))}


def _even(norm: Norm) -> float:
    """How much the share of the length that a head has changes over the tokens; where it does not, both kinds are one function."""
    size = norm.x.square().mean(-1).sqrt()
    share = size / size.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
    return float((share.std(0) / share.mean(0).clamp_min(1e-300)).max())


def _foreign(norm: Norm, found: tuple[Shape, bool]) -> int:
    """How much of a shape is not the checkpoint's: its weight, its bias.

    Where the length of the whole vector follows from that of each head, a norm of either kind explains the other with weights and
    a bias of its own.
    """
    shape = found[0]
    return (whose_weight(norm, shape, {}).whose == ANOTHER) + (whose_bias(norm, shape) not in (OWN, None))


def _weight(evidence: Evidence, role: str, like: Tensor) -> Tensor | None:
    """The checkpoint's weight as `[head d_head]`: one vector for all heads, or one per head."""
    weight = evidence.weight(role)
    if weight is None:
        return None
    flat, sizes = f64(weight).flatten(), like.shape[1:]
    if flat.numel() == sizes[-1]:
        return flat.expand(sizes)
    return flat.reshape(sizes) if flat.numel() == sizes.numel() else None


def _elsewhere(evidence: Evidence, norm: Norm, which: str) -> list[Outcome]:
    """The place of the norm does nothing: does one stand behind the rotation? A rotation alone keeps every length."""
    tokens = tokens_of(evidence, which, f"rot_{which}", TOKENS)
    if tokens is None or turns_pairs(*tokens):
        return []
    found = _after_rotation(evidence, dataclasses.replace(norm, x=tokens[0], out=tokens[1]), 0.0)
    return found if all(isinstance(item, KnobFit) for item in found) else []


def _after_rotation(evidence: Evidence, norm: Norm, left: float) -> list[Outcome]:
    """No diagonal weight explains it: is it a norm of rotated vectors?"""
    for offset in (0.0, 1.0) if norm.w is not None else (0.0,):
        w = torch.ones_like(norm.x[0]) if norm.w is None else norm.w + offset
        undone = norm.out / w
        size = undone.square().mean(-1, keepdim=True).sqrt() / norm.x.square().mean(-1, keepdim=True).sqrt()
        turned = dataclasses.replace(norm, out=undone / size)
        if turns_pairs(turned.x, turned.out):
            return [_word(evidence, norm, PRESENT, "present", left), _word(evidence, norm, ORDER, AFTER, left)]
    return [gap(evidence, knob, f"no norm explains {norm.site}: {left:.2g} left") for knob in (PRESENT, ORDER)]


def turns_pairs(x: Tensor, y: Tensor) -> bool:
    """Whether y keeps the length of each pair of components of x, in one of the two usual pairings."""
    half = x.shape[-1] // 2
    halves = [t.reshape(*t.shape[:-1], 2, half).norm(dim=-2) for t in (x, y)]
    neighbours = [t.reshape(*t.shape[:-1], half, 2).norm(dim=-1) for t in (x, y)]
    return any(relative_rms(after - before, before) < EXPLAINED for before, after in (halves, neighbours))


def _word(evidence: Evidence, norm: Norm, knob: str, value: KnobValue, left: float) -> KnobFit:
    return KnobFit(
        knob=knob, layer=evidence.layer, value=value, stderr=None, residual=left, n=norm.x.numel(), site=norm.site
    )
