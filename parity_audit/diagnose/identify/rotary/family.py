"""Rotary embedding: which vectors and components turn, how they pair, theta and scaling, positions, arithmetic.

Read from q and k before and after rotation. `turns` finds the components and their pairing, `angles`
one frequency per pair, `tables` the theta and scaling behind them, `positions` where the tokens stand,
`dtype` the rounding of the tables. A table that no formula explains is reported as it is
(`{"rope_type": "table", "inv_freq": [...]}`). Where sequences of different length have different tables
(longrope, dynamic NTK), short and long ones are read apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.rotary.angles import Rotation, measure
from parity_audit.diagnose.identify.rotary.knobs import table_knobs
from parity_audit.diagnose.identify.rotary.mixed import mixed_pairing
from parity_audit.diagnose.identify.rotary.positions import described
from parity_audit.diagnose.identify.rotary.turns import Layout, Turn, is_unrotated, layout_of, q_over_k, turns_of
from parity_audit.diagnose.thresholds import ALIKE

PAIRING, DIMS, FIRST, LAYERS = "rope.pairing", "rope.partial", "rope.first_dim", "rope.layers"
OFFSET, DIRECTION, THETA, SCALING = "rope.offset", "rope.direction", "rope.theta", "rope.scaling"
UNEVEN_LENGTHS = 4.0


def fit(evidence: Evidence) -> list[Outcome]:
    """The rope knobs of one layer; nothing where neither the spec nor the activations know of rotation."""
    if evidence.layer is None:
        return []
    ratio, probes = q_over_k(evidence), list(evidence.probes)
    found = {name: turns_of(evidence, probes, (name,), q_scale=ratio) for name in ("q", "k")}
    seen = {name: turns for name, turns in found.items() if turns}
    if not seen:
        why = "q and k are not visible both before and after rotation"
        rotates = any(knob.startswith("rope.") for knob in evidence.knobs)
        return [gap(evidence, knob, why) for knob in (PAIRING, THETA, SCALING)] if rotates else []
    moving = [name for name, turns in seen.items() if not is_unrotated(turns)]
    both = "q and k" if len(moving) == len(seen) else f"{moving[0]} only" if moving else "none"
    layers = _exact(evidence, LAYERS, both, 0.0, sum(len(turn.position) for turns in seen.values() for turn in turns))
    if not moving:
        return [layers]
    return [layers, *_read_together_or_apart(evidence, seen, moving, ratio)]


def _read_together_or_apart(
    evidence: Evidence, seen: dict[str, list[Turn]], moving: list[str], ratio: float
) -> list[Outcome]:  # fmt: skip
    """q and k turn alike in every model; where that does not fit, each is read for itself."""
    outcomes, explained = _read(evidence, turns_of(evidence, list(evidence.probes), moving, q_scale=ratio))
    if explained or len(moving) < 2:
        return outcomes
    apart = {name: _read(evidence, seen[name]) for name in moving}
    if not all(good for _, good in apart.values()):
        return outcomes
    return _combined(apart["q"][0], apart["k"][0])


def _combined(q: list[Outcome], k: list[Outcome]) -> list[Outcome]:
    """q's fits; where k says otherwise, both in one value."""
    others = {fit.knob: fit for fit in k if isinstance(fit, KnobFit)}
    out: list[Outcome] = []
    for fit in q:
        other = others.get(fit.knob) if isinstance(fit, KnobFit) else None
        if not isinstance(fit, KnobFit) or other is None or _alike(fit.value, other.value):
            out.append(fit)
        else:
            out.append(KnobFit(
                knob=fit.knob, layer=fit.layer, value={"q": fit.value, "k": other.value}, stderr=None, n=fit.n,
                residual=max(fit.residual, other.residual), site=fit.site, evidence={"q": fit.evidence, "k": other.evidence},
            ))  # fmt: skip
    return out


def _alike(a: KnobValue, b: KnobValue) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= ALIKE * max(abs(a), abs(b))
    return a == b


def _read(evidence: Evidence, turns: Sequence[Turn]) -> tuple[list[Outcome], bool]:
    """The knobs of these vectors, and whether a rotation explains them."""
    layout = layout_of(turns)
    if isinstance(layout, str):
        both = mixed_pairing(turns)
        if both is not None:
            return [_exact(evidence, PAIRING, both, 0.0, len(turns))], False
        return [gap(evidence, knob, layout) for knob in (PAIRING, THETA, SCALING)], False
    layout = _settled(evidence, layout)
    short, long = [turn for turn in turns if not turn.long], [turn for turn in turns if turn.long]
    rotation = measure(turns, layout)
    beyond: Rotation | None = None
    if short and long:
        near = measure(short, layout)
        if near.even and rotation.residual > UNEVEN_LENGTHS * max(near.residual, ALIKE):
            rotation, beyond = near, measure(long, layout)
    read = turns if beyond is None else short
    outcomes = _layout_knobs(evidence, rotation)
    if not rotation.even:
        why = f"the pairs do not turn evenly: {rotation.residual:.2g} unexplained"
        return outcomes + table_knobs(evidence, rotation, read, None, why), False
    offset, facts = described(read, rotation.positions)
    outcomes.append(_exact(evidence, OFFSET, offset, rotation.residual, rotation.n, facts))
    return outcomes + table_knobs(evidence, rotation, turns, beyond), True


def _settled(evidence: Evidence, layout: Layout) -> Layout:
    """In a narrow dtype slow pairs look still: the spec's count holds if at least as many move."""
    spec = int(evidence.spec_number(DIMS, evidence.dims["d_head"]))
    if layout.exact or spec < layout.d_rot:
        return layout
    return Layout(pairing=layout.pairing, first=layout.first, d_rot=spec)


def _layout_knobs(evidence: Evidence, rotation: Rotation) -> list[Outcome]:
    values: dict[str, KnobValue] = {
        PAIRING: rotation.layout.pairing,
        DIMS: rotation.layout.d_rot,
        FIRST: rotation.layout.first,
    }
    return [_exact(evidence, knob, value, rotation.residual, rotation.n) for knob, value in values.items()]


def _exact(
    evidence: Evidence, knob: str, value: KnobValue, residual: float, n: int, facts: dict[str, object] | None = None
) -> KnobFit:  # fmt: skip
    return KnobFit(knob=knob, layer=evidence.layer, value=value, stderr=None, residual=residual, n=n, site="rot_q",
                   evidence=facts or {})  # fmt: skip
