"""The experts of a mixture: no hook stands between their input and their sum, so the sum is made again.

    y = sum_e w_e D_e h(G_e x, U_e x)

with x = ln2.out, y = mlp_out (beside an MLP: ln2_experts.out and mlp.routed), the weights w that the router hands out, and
the checkpoint's tensors. The activation h that leaves least of y is the answer: every named one, with the gate and the linear
input in both orders, and the two with a parameter of their own (`curves`). Where none explains y, the weights may stand
elsewhere: on x, or nowhere.

mlp.activation, mlp.gate_up (as for dense blocks) and moe.weighted: "outputs", "inputs" or "nothing". moe.dropped: tokens whose
sum lacks the share of one of their experts, or of all (an expert that takes only so many tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, f64, gap, real, relative_rms, spread
from parity_audit.diagnose.identify.mlp.activation import (
    ACTIVATION,
    EXPLAINED,
    GATED,
    ROUNDING,
    chosen,
)
from parity_audit.diagnose.identify.mlp.curves import ALPHAS, narrowed
from parity_audit.diagnose.thresholds import CLEAR
from parity_audit.formulas.activations import CLAMP, CLAMPED, NAMED, SWISH_SLOPE, canonical, clamped_swiglu

WEIGHTED, DROPPED = "moe.weighted", "moe.dropped"
TOKENS, MORE_TOKENS, LIMITS = 32, 256, (0.5, 100.0)
RIGHT, NO_TOKEN = 1e-3, "no token"
Hidden = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Expert:
    """The tokens that one expert gets, their weights `[token 1]`, and its tensors."""

    tokens: Tensor
    weight: Tensor
    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor

    def output(self, hidden: Hidden, weighted: str) -> Tensor:
        """What it adds to its tokens."""
        x = self.x * self.weight if weighted == "inputs" else self.x
        out = hidden(x @ self.gate.T + self.gate_bias, x @ self.up.T + self.up_bias) @ self.down.T + self.down_bias
        return out * self.weight if weighted == "outputs" else out


def fit(evidence: Evidence) -> list[Outcome]:
    """What the experts of one block compute, where their tensors and the router's weights are known."""
    if evidence.layer is None or evidence.weight("moe.gate.0") is None:
        return []
    seen = _seen(evidence)
    if seen is None:
        return [gap(evidence, ACTIVATION, "the experts' inputs, outputs or weights are not visible")]
    x, weights, y = seen
    experts = [expert for e in range(weights.shape[1]) if (expert := _expert(evidence, e, x, weights)) is not None]

    def left(hidden: Hidden, weighted: str = "outputs") -> float:
        made = torch.zeros_like(y)
        for expert in experts:
            made.index_add_(0, expert.tokens, expert.output(hidden, weighted))
        return relative_rms(made - y, y)

    tried, (_, site) = _tried(left), _ends(evidence)
    if min(tried.values()) <= EXPLAINED:
        outputs = KnobFit(
            knob=WEIGHTED, layer=evidence.layer, value="outputs", stderr=None, residual=min(tried.values()), n=y.numel(), site=site
        )  # fmt: skip
        return [*chosen(evidence, tried, gated=True, n=y.numel(), site=site), outputs, *_dropped(evidence)]
    return _dropped(evidence) or _elsewhere(evidence, left, y.numel())


def _tried(left: Callable[..., float]) -> dict[tuple[str, bool], float]:
    """What each activation leaves, in both orders of its inputs."""
    hidden: dict[tuple[str, bool], Hidden] = {}
    for name, act in NAMED.items():
        hidden[name, False] = lambda g, u, act=act: act(g) * u  # type: ignore[misc]
        hidden[name, True] = lambda g, u, act=act: act(u) * g  # type: ignore[misc]
    for name, gated in GATED.items():
        hidden[name, False] = gated
        hidden[name, True] = lambda g, u, gated=gated: gated(u, g)  # type: ignore[misc]
    found = {key: left(how) for key, how in hidden.items()}
    least = min(found.values())
    if least > ROUNDING:
        alpha, rest = narrowed(lambda a: left(lambda g, u: g * torch.sigmoid(a * g) * u), ALPHAS)
        clamped, rest_clamped = narrowed(lambda a: left(lambda g, u: clamped_swiglu(g, u, a, CLAMP)), ALPHAS)
        limit, rest_limit = narrowed(lambda b: left(lambda g, u: clamped_swiglu(g, u, SWISH_SLOPE, b)), LIMITS)
        own = {f"swish({alpha:.4g})": rest, f"{CLAMPED}({clamped:.4g}, {CLAMP:g})": rest_clamped,
               f"{CLAMPED}({SWISH_SLOPE:g}, {limit:.4g})": rest_limit}  # fmt: skip
        found |= {(name, False): value for name, value in own.items() if value * CLEAR < least and value <= EXPLAINED}
    return found


def _usual(evidence: Evidence) -> Hidden | None:
    """What the spec says the experts compute inside."""
    name = canonical(evidence.spec_value(ACTIVATION))
    if name in GATED:
        return GATED[name]
    return (lambda g, u: NAMED[name](g) * u) if name in NAMED else None


def _dropped(evidence: Evidence) -> list[Outcome]:
    """For how many tokens a share is missing; nothing where that is not all that is wrong."""
    how, seen = _usual(evidence), _seen(evidence, MORE_TOKENS)
    if how is None or seen is None:
        return []
    x, weights, y = seen
    shares = [(expert.tokens, expert.output(how, "outputs"))
              for e in range(weights.shape[1]) if (expert := _expert(evidence, e, x, weights)) is not None]  # fmt: skip
    made, size = torch.zeros_like(y), y.norm(dim=1).median()
    for tokens, share in shares:
        made.index_add_(0, tokens, share)
    rest = made - y
    least = torch.minimum(rest.norm(dim=1), y.norm(dim=1))  # nothing at all is missing, or everything
    for tokens, share in shares:
        least[tokens] = torch.minimum(least[tokens], (rest[tokens] - share).norm(dim=1))
    if float(least.max()) > RIGHT * float(size):
        return []
    lacking = int((rest.norm(dim=1) > RIGHT * size).sum())
    value = f"a share of {lacking} of {len(y)} tokens" if lacking else NO_TOKEN
    return [KnobFit(knob=DROPPED, layer=evidence.layer, value=value, stderr=None, residual=float(least.max() / size),
                    n=y.numel(), site=_ends(evidence)[1])]  # fmt: skip


def _elsewhere(evidence: Evidence, left: Callable[..., float], n: int) -> list[Outcome]:
    """The spec's activation, with the router's weights in another place."""
    how, (_, site) = _usual(evidence), _ends(evidence)
    for place in ("inputs", "nothing") if how is not None else ():
        rest = left(how, place)
        if rest <= EXPLAINED:
            return [
                KnobFit(knob=WEIGHTED, layer=evidence.layer, value=place, stderr=None, residual=rest, n=n, site=site)
            ]
    return [gap(evidence, ACTIVATION, f"no known activation of the experts makes {site}")]


def _ends(evidence: Evidence) -> tuple[str, str]:
    """The sites of x and y."""
    return ("ln2.out", "mlp_out") if evidence.weight("norm.routed_post") is None else ("ln2_experts.out", "mlp.routed")


def _seen(evidence: Evidence, count: int = TOKENS) -> tuple[Tensor, Tensor, Tensor] | None:
    """x, the router's weights and y of some real tokens."""
    into, out = _ends(evidence)
    found: list[list[Tensor]] = []
    for probe in evidence.short_probes():
        sites = [evidence.tensor(probe.name, site) for site in (into, "mlp.router_weights", out)]
        if all(site is not None for site in sites):
            found.append([site[real(probe)] for site in sites if site is not None])
    if not found:
        return None
    picked = spread(sum(len(part[0]) for part in found), count)
    x, weights, y = (f64(torch.cat([part[k] for part in found])[picked]) for k in range(3))
    return x, weights, y


def _expert(evidence: Evidence, e: int, x: Tensor, weights: Tensor) -> _Expert | None:
    """None where no token was sent to it."""
    tokens = weights[:, e].nonzero()[:, 0]
    tensors: Sequence[Tensor | None] = [evidence.weight(f"moe.{part}.{e}") for part in ("gate", "up", "down")]
    if len(tokens) == 0 or any(tensor is None for tensor in tensors):
        return None
    gate, up, down = (f64(tensor) for tensor in tensors if tensor is not None)

    def bias(part: str) -> Tensor:
        found = evidence.weight(f"moe.{part}.bias.{e}")
        return torch.zeros((), dtype=torch.float64) if found is None else f64(found).flatten()

    return _Expert(
        tokens=tokens, weight=weights[tokens, e][:, None], x=x[tokens], gate=gate, up=up, down=down,
        gate_bias=bias("gate"), up_bias=bias("up"), down_bias=bias("down"),
    )  # fmt: skip
