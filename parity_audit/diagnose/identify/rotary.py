"""Rotary embedding: pairing, rotated components, theta and scaling, read from q before and after rotation.

`rotary_angles` measures one frequency per pair; `rotary_tables` finds the theta and scaling that make them.
A table that no formula explains is reported as it is (`{"rope_type": "table", "inv_freq": [...]}`).
"""

from __future__ import annotations

import math

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.rotary_angles import (
    ROTATES,
    Rotation,
    Turn,
    is_unrotated,
    measure,
    partner_of_first,
    turns_of,
)
from parity_audit.diagnose.identify.rotary_tables import TableFit, explain

PAIRING, DIMS, THETA, SCALING, OFFSET = "rope.pairing", "rope.dims", "rope.theta", "rope.scaling", "rope.offset"
MAGNITUDE_EPS = 1e-3


def fit(evidence: Evidence) -> list[Outcome]:
    """rope.pairing, rope.dims, rope.theta, rope.scaling and rope.offset of one layer."""
    if evidence.layer is None:
        return []
    turns = turns_of(evidence, evidence.probes)
    if not turns:
        why = "q and k are not visible both before and after rotation"
        return [gap(evidence, knob, why) for knob in (PAIRING, THETA, SCALING)]
    if is_unrotated(turns):
        return [_exact(evidence, DIMS, 0, 0.0, sum(len(turn.position) for turn in turns))]
    partner, share, runner_up = partner_of_first(turns)
    if share > ROTATES or runner_up < 4 * share:
        why = f"no pair of components rotates: the best leaves {share:.2g} unexplained, the next {runner_up:.2g}"
        return [gap(evidence, knob, why) for knob in (PAIRING, THETA, SCALING)]
    return _knobs(evidence, turns, "adjacent" if partner == 1 else "half", partner)


def _knobs(evidence: Evidence, turns: list[Turn], pairing: str, partner: int) -> list[Outcome]:
    d_head = evidence.dims["d_head"]
    d_rot = int(evidence.spec_number(DIMS, d_head)) if pairing == "adjacent" else 2 * partner
    rotation = measure(turns, pairing, d_rot)
    outcomes: list[Outcome] = [
        _exact(evidence, PAIRING, pairing, rotation.residual, rotation.n),
        _exact(evidence, DIMS, d_rot, rotation.residual, rotation.n),
    ]
    if rotation.residual > ROTATES:
        why = f"the pairs do not turn evenly: {rotation.residual:.2g} unexplained"
        return outcomes + [gap(evidence, knob, why) for knob in (THETA, SCALING)]
    outcomes.append(_offset(evidence, rotation))
    theta = evidence.spec_value(THETA)
    spec_theta = float(theta) if isinstance(theta, (int, float)) else None
    table = explain(rotation.inv_freq, rotation.stderr, spec_theta, evidence.spec_value(SCALING))
    return outcomes + _table_knobs(evidence, rotation, table)


def _exact(evidence: Evidence, knob: str, value: str | int, residual: float, n: int) -> KnobFit:
    return KnobFit(knob=knob, layer=evidence.layer, value=value, stderr=None, residual=residual, n=n, site="rot_q")


def _offset(evidence: Evidence, rotation: Rotation) -> KnobFit:
    """Where positions start: 0, another number for all sequences, or "differs between rows"."""
    distinct = sorted(set(rotation.offsets))
    value = distinct[0] if len(distinct) == 1 else "differs between rows"
    return KnobFit(
        knob=OFFSET, layer=evidence.layer, value=value, stderr=None, residual=rotation.residual, n=rotation.n,
        site="rot_q", evidence={"offsets": list(rotation.offsets), "note": "scores depend on distances only"},
    )  # fmt: skip


def _table_knobs(evidence: Evidence, rotation: Rotation, table: TableFit | None) -> list[Outcome]:
    facts = {
        "inv_freq": [float(f"{f:.8g}") for f in rotation.inv_freq.tolist()],
        "longest_position": rotation.horizon,
        "magnitude": rotation.magnitude,
    }
    scaling = table.scaling if table is not None else {"rope_type": "table", "inv_freq": facts["inv_freq"]}
    if not math.isclose(rotation.magnitude, 1.0, abs_tol=MAGNITUDE_EPS) and (
        not isinstance(scaling, dict) or "attention_factor" not in scaling
    ):
        scaling = {**(scaling or {"rope_type": "default"}), "attention_factor": rotation.magnitude}
    if table is not None:
        facts |= {"hypothesis": table.name, "pairs_used": table.pairs, "worst_pair_sigmas": table.worst,
                  "stderr": table.stderr}  # fmt: skip
    scaling_fit = KnobFit(
        knob=SCALING, layer=evidence.layer, value=scaling, stderr=table.stderr.get("factor") if table else None,
        residual=rotation.residual, n=rotation.n, site="rot_q", evidence=facts,
    )  # fmt: skip
    if table is None:
        return [gap(evidence, THETA, "no formula explains the table of frequencies"), scaling_fit]
    return [
        KnobFit(
            knob=THETA, layer=evidence.layer, value=table.theta, stderr=table.theta_stderr, residual=rotation.residual,
            n=rotation.n, site="rot_q", evidence=facts,
        ),
        scaling_fit,
    ]  # fmt: skip
