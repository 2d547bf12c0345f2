"""From measured frequencies to rope.theta, rope.scaling, rope.direction and rope.dtype.

The magnitude of the rotation is part of the scaling: `attention_factor` stands in it where it is not the one that the
scaling itself implies (yarn: 0.1 ln(factor) + 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.rotary.angles import Rotation
from parity_audit.diagnose.identify.rotary.dtype import arithmetic
from parity_audit.diagnose.identify.rotary.scalings import known, log_table
from parity_audit.diagnose.identify.rotary.tables import LOG_EPS, TableFit, explain
from parity_audit.diagnose.identify.rotary.turns import Turn
from parity_audit.diagnose.thresholds import SIGMAS
from parity_audit.formulas.frequencies import attention_factor, dynamic_theta, kind_of
from parity_audit.formulas.knobs import FULL
from parity_audit.formulas.rounding import any_narrow

THETA, SCALING, DIRECTION, DTYPE = "rope.theta", "rope.scaling", "rope.direction", "rope.dtype"
MAGNITUDE_EPS = 1e-3
NARROW_EPS, NARROW_ANGLE = 1e-3, 0.1
ROUNDED_FACTOR = 2.0


def table_knobs(
    evidence: Evidence, rotation: Rotation, turns: Sequence[Turn], beyond: Rotation | None, why: str | None = None
) -> list[Outcome]:  # fmt: skip
    """The knobs of a table; `beyond` is what long sequences show where it differs, `why` why nothing turns evenly."""
    forward = float(rotation.inv_freq.sum()) >= 0
    outcomes: list[Outcome] = []
    if why is None:
        outcomes.append(_fit(evidence, DIRECTION, "forward" if forward else "inverse", rotation, {}))
    rotation = _trusted(rotation if forward else _reversed(rotation), turns)
    beyond = beyond if beyond is None or forward else _reversed(beyond)
    beyond = beyond if beyond is None else _trusted(beyond, turns)
    rounded = _rounded(evidence, rotation, turns)
    if rounded is not None:
        return [*outcomes, *rounded]
    if why is not None:
        return [*outcomes, *(gap(evidence, knob, why) for knob in (THETA, SCALING))]
    return [*outcomes, *_values(evidence, rotation, turns, beyond), *_full(evidence, rotation, turns)]


def _narrow(turns: Sequence[Turn]) -> bool:
    """Whether q and k are in a narrow dtype, and with them, as a rule, the tables."""
    return any_narrow(torch.cat([turn.before.flatten() for turn in turns[:3]]))


def _log_eps(turns: Sequence[Turn]) -> float:
    """The relative error of a frequency that the dtype explains: narrow tables round sin of all small angles."""
    return NARROW_EPS if _narrow(turns) else LOG_EPS


def _trusted(rotation: Rotation, turns: Sequence[Turn]) -> Rotation:
    """In a narrow dtype a + b sin rounds back to a for small angles, so slow pairs look slower than they are."""
    if not _narrow(turns):
        return rotation
    seen = rotation.inv_freq.abs() * rotation.horizon > NARROW_ANGLE
    return dataclasses.replace(rotation, stderr=torch.where(seen, rotation.stderr, torch.inf))


def _reversed(rotation: Rotation) -> Rotation:
    return dataclasses.replace(
        rotation, inv_freq=-rotation.inv_freq, factors=tuple(factor.conj() for factor in rotation.factors)
    )


def _spec(evidence: Evidence) -> tuple[float | None, Any]:
    theta = evidence.spec_value(THETA)
    return (float(theta) if isinstance(theta, (int, float)) else None), evidence.spec_value(SCALING)


def _spec_table(evidence: Evidence, pairs: int, length: int) -> Tensor | None:
    theta, scaling = _spec(evidence)
    if not theta or not known(scaling, theta, pairs, length):
        return None
    return log_table(theta, scaling, pairs, length).exp()


def _rounded(evidence: Evidence, rotation: Rotation, turns: Sequence[Turn]) -> list[Outcome] | None:
    """The spec's own table in a narrow dtype, where that is what the angles show: then theta and scaling are right."""
    table = _spec_table(evidence, rotation.inv_freq.numel(), rotation.horizon + 1)
    if table is None or _narrow(turns):
        return None
    value, left = arithmetic(rotation, table)
    if value == FULL:
        return None
    theta, scaling = _spec(evidence)
    facts = {"left_over": dict(sorted(left.items(), key=lambda item: item[1])[:3])}
    return [
        _fit(evidence, DTYPE, value, rotation, facts),
        _fit(evidence, THETA, theta, rotation, facts, stderr=MAGNITUDE_EPS * (theta or 0.0)),
        _fit(evidence, SCALING, _with_magnitude(scaling, rotation, evidence), rotation, facts),
    ]


def _full(evidence: Evidence, rotation: Rotation, turns: Sequence[Turn]) -> list[Outcome]:
    """No rounding was found with the spec's table: is there any with the measured one?"""
    if _narrow(turns):
        return [gap(evidence, DTYPE, "q and k are in a narrow dtype themselves")]
    value, _ = arithmetic(rotation, rotation.inv_freq)
    return [_fit(evidence, DTYPE, value, rotation, {})]


def _values(
    evidence: Evidence, rotation: Rotation, turns: Sequence[Turn], beyond: Rotation | None
) -> list[Outcome]:  # fmt: skip
    """rope.theta and rope.scaling."""
    theta, spec_scaling = _spec(evidence)
    near, far = [t.length for t in turns if not t.long], [t.length for t in turns if t.long]
    seen = [max(lengths) for lengths in (near, far) if lengths]
    table = explain(rotation.inv_freq, rotation.stderr, theta, spec_scaling,
                    seen[:1] if beyond is not None else seen, _log_eps(turns))  # fmt: skip
    facts = _facts(rotation, table)
    scaling = table.scaling if table is not None else {"rope_type": "table", "inv_freq": facts["inv_freq"]}
    if beyond is not None:
        scaling = _by_length(evidence, rotation, table, beyond, seen[-1], _log_eps(turns))
    scaling = _with_magnitude(scaling, rotation, evidence)
    error = table.stderr.get("factor") if table else None
    scaling_fit = _fit(evidence, SCALING, scaling, rotation, facts, stderr=error)
    if table is None:
        return [gap(evidence, THETA, "no formula explains the table of frequencies"), scaling_fit]
    return [_fit(evidence, THETA, table.theta, rotation, facts, stderr=table.theta_stderr), scaling_fit]


def _by_length(
    evidence: Evidence,
    near: Rotation,
    table: TableFit | None,
    beyond: Rotation,
    length: int,
    log_eps: float,
) -> dict[str, Any]:
    """One scaling whose table depends on the length: the spec's, dynamic NTK, or the two tables."""
    theta, spec_scaling = _spec(evidence)
    far = explain(beyond.inv_freq, beyond.stderr, theta, spec_scaling, [length], log_eps)
    pairs = near.inv_freq.numel()
    if far is not None and isinstance(far.scaling, dict) and known(far.scaling, far.theta, pairs, 1):
        first = log_table(far.theta, far.scaling, pairs, 1).exp()
        if bool(((first - near.inv_freq).abs() <= SIGMAS * (near.stderr + log_eps * first)).all()):
            return dict(far.scaling)
    plain = table is not None and kind_of(table.scaling) in ("default", "dynamic")
    if table is not None and plain and far is not None and far.scaling is None:
        return {"rope_type": "dynamic", **_dynamic(spec_scaling, far.theta, table.theta, 2 * pairs, length)}
    shown = [None if found is None else found.name for found in (table, far)]
    tables = [[float(f"{f:.6g}") for f in each.inv_freq.tolist()] for each in (near, beyond)]
    return {"rope_type": "by length", "short": shown[0] or tables[0], "long": shown[1] or tables[1], "length": length}


def _dynamic(spec: Any, far: float, near: float, d_rot: int, length: int) -> dict[str, Any]:
    """The factor that raises theta so far at this length, where the original context is known; the thetas otherwise."""
    given = spec if isinstance(spec, dict) else {}
    names = ("original_max_position_embeddings", "max_position_embeddings")
    name = next((name for name in names if given.get(name)), None)
    if name is None:
        return {"length": length, "theta_there": far}
    stretch = length / float(given[name])
    factor = ((far / near) ** ((d_rot - 2) / d_rot) - 1) / (stretch - 1)
    assert math.isclose(dynamic_theta(near, {"factor": factor, name: given[name]}, d_rot, length), far, rel_tol=1e-6)
    return {"factor": factor, name: given[name]}


def _with_magnitude(scaling: Any, rotation: Rotation, evidence: Evidence) -> Any:
    """The scaling, with its attention factor where it does not follow from the rest."""
    said = evidence.spec_value(SCALING) if kind_of(scaling) == "longrope" else scaling
    implied = attention_factor(said if isinstance(said, dict) else None)
    # A table in a narrow dtype rounds the factor of all its slow pairs the same way.
    if abs(rotation.magnitude - implied) <= max(MAGNITUDE_EPS, ROUNDED_FACTOR * rotation.residual) * implied:
        return scaling
    return {**(scaling or {"rope_type": "default"}), "attention_factor": rotation.magnitude}


def _facts(rotation: Rotation, table: TableFit | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "inv_freq": [float(f"{f:.8g}") for f in rotation.inv_freq.tolist()],
        "longest_position": rotation.horizon,
        "magnitude": rotation.magnitude,
    }
    if table is not None:
        facts |= {"hypothesis": table.name, "pairs_used": table.pairs, "worst_pair_sigmas": table.worst,
                  "stderr": table.stderr}  # fmt: skip
    return facts


def _fit(
    evidence: Evidence, knob: str, value: Any, rotation: Rotation, facts: dict[str, Any], *, stderr: float | None = None
) -> KnobFit:  # fmt: skip
    return KnobFit(knob=knob, layer=evidence.layer, value=value, stderr=stderr, residual=rotation.residual,
                   n=rotation.n, site="rot_q", evidence=facts)  # fmt: skip
