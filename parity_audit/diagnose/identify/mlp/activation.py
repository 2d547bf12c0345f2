"""Activation and gating of the MLP: post = act(pre) * pre_linear, or act(pre) without a gate.

Every variant is tried with the two inputs in either order; the one that leaves least wins, if it explains
post up to rounding. Variants that explain it as well (tanh and erf GELU on tiny inputs) are tied, not picked.
Where a curve with a free parameter leaves clearly less than every named one, that curve is it (`curves`).
gpt-oss clamps: post = (clamp(linear, -7, 7) + 1) * x sigmoid(1.702 x) with x = min(pre, 7).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.core.types import NotTested
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread
from parity_audit.diagnose.identify.mlp.curves import fitted_curve
from parity_audit.diagnose.thresholds import CLEAR, TIED
from parity_audit.formulas.activations import CLAMP, CLAMPED, NAMED, SWISH_SLOPE, canonical, clamped_swiglu
from parity_audit.formulas.choices import GATE_UP

ACTIVATION, GATING = "mlp.activation", "mlp.gate_up"
TOKENS = 128
EXPLAINED = 0.02
ROUNDING = 1e-5
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    CLAMPED: lambda x, gate: clamped_swiglu(x, gate, SWISH_SLOPE, CLAMP),
    f"{CLAMPED} without the 1 added": lambda x, gate: clamped_swiglu(x, gate, SWISH_SLOPE, CLAMP, added=0.0),
}


def fit(evidence: Evidence) -> list[Outcome]:
    """mlp.activation and, where the MLP is gated, which input is activated."""
    if evidence.layer is None:
        return []
    inputs = _inputs(evidence)
    if inputs is None:
        return [gap(evidence, ACTIVATION, "the inner activations of the MLP are not visible")]
    pre, linear, post = inputs
    orders = {False: (pre, linear)} if linear is None else {False: (pre, linear), True: (linear, pre)}
    tries: dict[tuple[str, bool], Tensor] = {}
    for swap, (x, gate) in orders.items():
        tries |= {(name, swap): act(x) if gate is None else act(x) * gate for name, act in NAMED.items()}
        if gate is not None:
            tries |= {(name, swap): act(x, gate) for name, act in GATED.items()}
    if linear is None:
        del tries["none", False]
    left = {key: relative_rms(value - post, post) for key, value in tries.items()}
    least = min(left.values())
    if least > ROUNDING:
        for swap, (x, gate) in orders.items():
            name, rest = fitted_curve(x, gate, post, NAMED)
            if rest * CLEAR < least and rest <= EXPLAINED:
                left[name, swap] = rest
    return chosen(evidence, left, gated=linear is not None, n=post.numel())


def _inputs(evidence: Evidence) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """pre, pre_linear (None without a gate) and post `[token d_mlp]`."""
    found = []
    for probe in evidence.short_probes():
        sites = [evidence.tensor(probe.name, site) for site in ("mlp.pre", "mlp.pre_linear", "mlp.post")]
        if sites[0] is not None and sites[2] is not None:
            kept = real(probe)
            found.append([None if x is None else x[kept] for x in sites])
    if not found:
        return None
    chosen = spread(sum(len(item[0]) for item in found if item[0] is not None), TOKENS)
    joined = [f64(torch.cat([x for x in column if x is not None])[chosen]) if None not in column else None
              for column in ([item[k] for item in found] for k in range(3))]  # fmt: skip
    pre, linear, post = joined
    assert pre is not None
    assert post is not None
    return pre, linear, post


def chosen(
    evidence: Evidence, left: dict[tuple[str, bool], float], *, gated: bool, n: int, site: str = "mlp.post"
) -> list[Outcome]:
    """The activation that leaves least, with those that leave about as little; and which input is activated."""
    best = min(left, key=lambda key: left[key])
    if left[best] > EXPLAINED:
        why = f"no known activation explains mlp.post: the best, {best[0]}, leaves {left[best]:.2g}"
        return [gap(evidence, ACTIVATION, why)]
    tied = [key for key in left if key != best and left[key] <= TIED * left[best] + 1e-12]
    spec = evidence.spec_value(ACTIVATION)
    names = sorted({name for name, _ in (best, *tied)})
    value = canonical(spec) if canonical(spec) in names else best[0]
    shown = spec if spec is not None and canonical(spec) == value else value
    nearest = sorted(left.items(), key=lambda item: item[1])[:6]
    facts = {
        "left_over": {f"{name}{' swapped' if swap else ''}": float(f"{rms:.3g}") for (name, swap), rms in nearest},
        "tied_with": [name for name in names if name != value],
    }
    outcomes: list[KnobFit | NotTested] = [KnobFit(
        knob=ACTIVATION, layer=evidence.layer, value=shown, stderr=None, residual=left[best], n=n, site=site,
        evidence=facts,
    )]  # fmt: skip
    if gated and len({swap for _, swap in (best, *tied)}) == 1:
        outcomes.append(KnobFit(
            knob=GATING, layer=evidence.layer, value=GATE_UP[int(best[1])], stderr=None,
            residual=left[best], n=n, site=site, evidence=facts,
        ))  # fmt: skip
    return outcomes
