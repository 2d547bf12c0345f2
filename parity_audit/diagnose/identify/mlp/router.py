"""The router of a mixture of experts: how many experts, which, and with what weights.

From the logits l `[token expert]` and the weights w `[token expert]` that reach the experts (0: not chosen):

- moe.top_k: how many weights of a token are not 0;
- moe.choice: whether these are the experts with the largest logits;
- moe.temperature: T in w_i / w_j = exp((l_i - l_j) / T), by least squares on the logarithms, where w is of that form;
- moe.router and moe.norm_topk: the law f that leaves least of w = s f(l / T): a softmax or a sigmoid, divided by its
  sum over the chosen or not, equal weights, or the logits as they are. A softmax that is renormalised over the chosen
  *is* the softmax of the chosen alone, so the order of softmax and choice shows only where nothing is renormalised;
- moe.scale: s, by least squares;
- moe.router_dtype: whether the law reproduces w better with the logits or the weights rounded to a narrow dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms
from parity_audit.diagnose.identify.least_squares import ratio
from parity_audit.diagnose.identify.rounding import FULL, NARROW, any_narrow, best_of, like_rounding, rounded
from parity_audit.formulas.experts import Rounding, router_weights

LOGITS, WEIGHTS = "mlp.router_logits", "mlp.router_weights"
EXPLAINED, TIED = 0.02, 1e-5
STRAIGHT = 0.01  # of the logarithms, what a straight line may leave
EXACT, NEAR = 1e-6, 2**-7


@dataclass(frozen=True, kw_only=True)
class _Law:
    """What makes a weight of a logit, and whether it is divided by its sum over the chosen."""

    router: str
    norm_topk: bool

    def weights(self, logits: Tensor, chosen: Tensor, low: Rounding = lambda x: x) -> Tensor:
        """The weights `[token expert]`, every step in the arithmetic of `low`."""
        return router_weights(logits, chosen, router=self.router, norm_topk=self.norm_topk, low=low)


LAWS = (
    _Law(router="softmax", norm_topk=True),
    _Law(router="softmax", norm_topk=False),
    _Law(router="sigmoid", norm_topk=True),
    _Law(router="sigmoid", norm_topk=False),
    _Law(router="equal weights", norm_topk=True),
    _Law(router="raw logits", norm_topk=False),
)


def fit(evidence: Evidence) -> list[Outcome]:
    """The router of one block, where its logits and its weights are both seen."""
    if evidence.layer is None or evidence.spec_value("moe.top_k") is None:
        return []
    seen = _seen(evidence)
    if seen is None:
        return [gap(evidence, "moe.router", "the router's logits or its weights are not visible")]
    logits, weights = seen
    chosen = weights != 0
    found = _counts(evidence, logits, chosen)
    law = _law(evidence, logits, weights, chosen)
    return [*found, *(law or [gap(evidence, "moe.router", "no softmax or sigmoid of the logits makes these weights")])]


def _seen(evidence: Evidence) -> tuple[Tensor, Tensor] | None:
    """Logits of the real tokens `[token expert]`, and their weights without the factor that is stored for each expert."""
    stored = evidence.weight("moe.expert_scale")
    factors = torch.ones((), dtype=torch.float64) if stored is None else f64(stored).flatten()
    pairs = []
    for probe in evidence.short_probes():
        logits, weights = (evidence.tensor(probe.name, site) for site in (LOGITS, WEIGHTS))
        if logits is not None and weights is not None and bool((weights != 0).any()):
            kept = real(probe)
            pairs.append((f64(logits[kept]), f64(weights[kept]) / factors))
    if not pairs:
        return None
    return torch.cat([logits for logits, _ in pairs]), torch.cat([weights for _, weights in pairs])


def _counts(evidence: Evidence, logits: Tensor, chosen: Tensor) -> list[Outcome]:
    """How many experts, and whether they are the best."""
    counts = chosen.sum(-1)
    low, high = int(counts.min()), int(counts.max())
    same = low == high
    outcomes: list[Outcome] = [
        _fit(evidence, "moe.top_k", low, len(counts), stderr=EXACT)
        if same
        else _fit(evidence, "moe.top_k", f"{low} to {high}", len(counts))
    ]
    worst = torch.where(chosen, logits, torch.inf).amin(-1)
    best_left = torch.where(chosen, -torch.inf, logits).amax(-1)
    wrong = int((best_left - worst > NEAR * logits.abs().amax(-1)).sum())  # nearer ones are a matter of rounding
    choice = "largest logits" if not wrong else _choice(logits, chosen)
    outcomes.append(_fit(evidence, "moe.choice", choice, len(counts), facts={"tokens_that_differ": wrong}))
    return outcomes


def _choice(logits: Tensor, chosen: Tensor) -> str:
    """What the choice goes by, if not by the largest logits: the smallest, or those of experts counted from elsewhere."""
    k, experts = int(chosen[0].sum()), logits.shape[-1]
    ranks = {
        f"the experts {step} after those of the largest logits": logits.roll(step, -1) for step in range(1, experts)
    }
    for name, score in {"smallest logits": -logits, "largest absolute logits": logits.abs(), **ranks}.items():
        picked = torch.zeros_like(chosen).scatter(-1, score.topk(k, -1).indices, True)
        if bool((picked == chosen).all()):
            return name
    return "not the largest logits"


def _law(evidence: Evidence, logits: Tensor, weights: Tensor, chosen: Tensor) -> list[Outcome] | None:
    temperature = _temperature(logits, weights, chosen)
    cold = logits if temperature is None else logits / temperature[0]
    left: dict[int, float] = {}
    for number, law in enumerate(LAWS):
        made = law.weights(cold if law.router == "softmax" else logits, chosen)
        left[number] = relative_rms(weights - _scale(made, weights) * made, weights)
    best = min(left, key=lambda number: (left[number] > TIED, left[number]))
    best = next(number for number in left if left[number] <= max(TIED, left[best]))
    if left[best] > EXPLAINED:
        return None
    law = LAWS[best]
    source = cold if law.router == "softmax" else logits
    tied = [LAWS[number] for number in left if number != best and left[number] <= max(TIED, 2 * left[best])]
    made = law.weights(source, chosen)
    scale = ratio(made[chosen][:, None], weights[chosen][:, None])
    count = len(weights)
    return [
        _fit(evidence, "moe.router", law.router, count, residual=left[best],
             facts={"tied_with": sorted({other.router for other in tied} - {law.router})}),
        _fit(evidence, "moe.norm_topk", law.norm_topk, count, residual=left[best],
             facts={"tied_with": sorted({other.norm_topk for other in tied} - {law.norm_topk})}),
        _fit(evidence, "moe.scale", float(scale.value[0]), count, stderr=max(float(scale.stderr[0]), EXACT), residual=left[best]),
        *_temperature_fit(evidence, temperature, law, count, left[best]),
        *_arithmetic(evidence, logits if temperature is None else logits / _plain(temperature[0]), weights, chosen, law),
    ]  # fmt: skip


def _scale(made: Tensor, weights: Tensor) -> float:
    return float((made * weights).sum()) / max(float(made.square().sum()), 1e-300)


def _plain(factor: float) -> float:
    """The factor without what rounding added to its estimate: rounding is only reproduced at the very numbers."""
    near = round(factor, 1)
    return near if abs(near - factor) <= NEAR * abs(factor) else factor


def _temperature(logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[float, float] | None:
    """T and its standard error, None where the weights are no exponential of the logits (or one expert is chosen)."""
    if int(chosen.sum(-1).min()) < 2 or bool((weights < 0).any()):
        return None

    def centred(x: Tensor) -> Tensor:
        x = torch.where(chosen, x, 0.0)
        return torch.where(chosen, x - x.sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True), 0.0)

    x, y = centred(logits), centred(torch.where(chosen, weights, 1.0).log())
    slope = _scale(x, y)
    if slope <= 0 or relative_rms(y - slope * x, y) > STRAIGHT:
        return None
    error = float((y - slope * x).norm()) / max(float(x.norm()), 1e-300) / max(len(x), 1) ** 0.5
    return 1 / slope, max(error / slope**2, EXACT)


def _temperature_fit(
    evidence: Evidence, temperature: tuple[float, float] | None, law: _Law, n: int, left: float
) -> list[Outcome]:
    if temperature is None or law.router != "softmax":
        return []
    value, stderr = temperature
    return [_fit(evidence, "moe.temperature", value, n, stderr=stderr, residual=left)]


def _arithmetic(evidence: Evidence, logits: Tensor, weights: Tensor, chosen: Tensor, law: _Law) -> list[Outcome]:
    """Where a narrow dtype stands; nothing can be said of a run that is in one."""
    if any_narrow(logits):
        return []
    exact = law.weights(logits, chosen)
    scale = _plain(_scale(exact, weights))
    variants = {FULL: scale * exact}
    for name, dtype in NARROW.items():
        low = functools.partial(rounded, dtype=dtype)
        variants[f"{name} logits"] = scale * law.weights(low(logits), chosen)
        variants[f"{name} weights"] = low(scale * exact)
        variants[f"{name} throughout"] = low(scale * law.weights(logits, chosen, low))
    value, _ = best_of(weights, variants)
    about = like_rounding(weights[chosen], scale * exact[chosen]) if value == FULL else None
    return [_fit(evidence, "moe.router_dtype", f"{about} somewhere" if about else value, len(weights))]


def _fit(
    evidence: Evidence, knob: str, value: KnobValue, n: int, *, stderr: float | None = None, residual: float = 0.0,
    facts: Mapping[str, object] | None = None,
) -> KnobFit:  # fmt: skip
    site = LOGITS if knob == "moe.choice" else WEIGHTS
    return KnobFit(
        knob=knob, layer=evidence.layer, value=value, stderr=stderr, residual=residual, n=n, site=site,
        evidence=dict(facts or {}),
    )  # fmt: skip
