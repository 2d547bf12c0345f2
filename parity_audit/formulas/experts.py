"""A mixture of experts: the router's weights, and the weighted sum of the experts' outputs.

    w = f(l) at the k largest logits l, 0 elsewhere       f: softmax or sigmoid over all experts
    c = f(l) + b                                          experts are chosen by c if there are groups or a bias b for the choice
    w = w / sum(w)                                        if weights are renormalised over the chosen experts
    y = sum_e w_e D_e h(G_e x, U_e x)
    y = sum_e D_e h(G_e w_e x, U_e w_e x)                 if weights multiply the inputs of the experts
    y + s(x) D h(G x, U x)                                if a shared expert takes all tokens; s: 1, or a sigmoid of x

A softmax that is renormalised over the chosen experts equals the softmax of their logits alone. Sources: Mixtral
(arXiv 2401.04088), Qwen3-MoE (arXiv 2505.09388), gpt-oss, Qwen1.5-MoE (transformers modeling_qwen2_moe), DeepSeek-V3
(arXiv 2412.19437), Llama 4 (transformers modeling_llama4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.formulas.choices import FULL, LARGEST, LARGEST_ABSOLUTE, SMALLEST, STEPS
from parity_audit.formulas.projections import project
from parity_audit.formulas.rounding import refuse_narrow, steps_of

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "equal weights": torch.ones_like,
    "raw logits": torch.clone,
}
SAME_SCORE = torch.finfo(torch.bfloat16).eps
"""Two scores count as equal if they differ by at most this share of the token's largest score. It is the relative rounding of
bfloat16, in which routers may run, so a program that takes the other one of two such experts makes no error."""
GROUP_BEST = 2
"""The number of experts whose scores are summed to rank a group (DeepSeek-V3)."""


def chosen_experts(logits: Tensor, top_k: int, choice: str = LARGEST) -> Tensor:
    """Return True at the `top_k` experts of each token, `[... expert]`, chosen by one of `choices.EXPERT_CHOICES`."""
    ranked = {SMALLEST: -logits, LARGEST_ABSOLUTE: logits.abs()}.get(choice, logits.roll(STEPS.get(choice, 0), -1))
    best = ranked.topk(min(top_k, logits.shape[-1]), -1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)


def are_largest(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return, per token, whether the chosen experts have its largest scores `[... expert]`, up to rounding (see `SAME_SCORE`)."""
    worst = torch.where(chosen, scores, torch.inf).amin(-1)
    best_left = torch.where(chosen, -torch.inf, scores).amax(-1)
    size: Tensor = torch.where(scores.isfinite(), scores, 0.0).abs().amax(-1)
    return best_left - worst <= SAME_SCORE * size


def scores_for_choice(
    logits: Tensor, *, router: str = "softmax", bias: Tensor | None = None, groups: int = 1, kept: int = 1
) -> Tensor:
    """Return the scores by which the experts of a token are chosen, `[... expert]`, -inf in the groups that are left out.

    Args:
        logits: `[... expert]`.
        router: the function from logits to scores, a key of `SCORES`.
        bias: added to the scores for the choice only, `[expert]`.
        groups: the number of groups of equally many consecutive experts, ranked by the sum of their `GROUP_BEST` largest scores.
        kept: the number of groups whose experts can be chosen.
    """
    scores = SCORES[router](logits)
    scores = scores if bias is None else scores + bias
    if kept >= groups:
        return scores
    grouped = rearrange(scores, "... (group expert) -> ... group expert", group=groups)
    worth = grouped.topk(min(GROUP_BEST, grouped.shape[-1]), -1).values.sum(-1)
    left = ~chosen_experts(worth, kept)
    return rearrange(grouped.masked_fill(left[..., None], -torch.inf), "... group expert -> ... (group expert)")


def router_weights(
    logits: Tensor, chosen: Tensor, *, router: str = "softmax", norm_topk: bool = True, temperature: float = 1.0,
    bias: Tensor | None = None, arithmetic: str = FULL,
) -> Tensor:  # fmt: skip
    """Return the weights of the experts, `[... expert]`, from logits of that shape; 0 for experts that are not chosen.

    Args:
        chosen: True at the experts that a token goes to.
        router: the function from logits to weights, a key of `SCORES`.
        norm_topk: whether weights are divided by their sum over the chosen experts.
        temperature: the divisor of the logits.
        bias: added to the weights before the sum is taken, `[expert]`.
        arithmetic: `full`, or a narrow dtype followed by one of `choices.PLACES_IN_A_ROUTER`.

    Raises:
        ValueError: `arithmetic` is narrow, but the logits fit a narrow dtype already, so its rounding could not be observed.
    """
    refuse_narrow(arithmetic, logits)
    step = steps_of(arithmetic)
    scored = step("scores", SCORES[router](step("logits", logits) / temperature))
    kept = (scored if bias is None else scored + bias) * chosen
    if norm_topk:
        kept = kept / step("sums", kept.sum(-1, keepdim=True)).clamp_min(TINY)
    return step("weights", kept)


def read_as_rows_of_experts(weights: Tensor) -> Tensor:
    """Return the weights `[batch pos expert]` as they are if their memory is read as `[expert (batch pos)]`.

    transformers 4.54 and 4.55 do this for Llama 4.
    """
    batch, pos, expert = weights.shape
    return rearrange(weights.flatten(), "(expert batch pos) -> batch pos expert", batch=batch, pos=pos, expert=expert)


@dataclass(frozen=True)
class Expert:
    """The tensors of one expert: weights `[out in]` and biases `[out]`."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def output(self, x: Tensor, hidden: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the expert's output for tokens x, `[token d_model]`; `hidden` combines the gate's and the up projection."""
        inner = hidden(project(x, self.gate, self.gate_bias), project(x, self.up, self.up_bias))
        return project(inner, self.down, self.down_bias)


def mixture(
    x: Tensor, weights: Tensor, experts: Sequence[Expert], hidden: Callable[[Tensor, Tensor], Tensor], *,
    weighted: str = "outputs", seen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y, the weighted sum of the experts' outputs, `[batch pos d_model]`; each expert computes only its own tokens.

    Args:
        x: the input of the experts, `[batch pos d_model]`.
        weights: `[batch pos expert]`; an expert's tokens are those with a weight other than 0.
        weighted: what the weights multiply, one of `choices.WEIGHTED`.
        seen: the captured y, to explain tokens dropped by experts with a limited capacity. If it is given, each token of the result
            lacks nothing, the share of one expert, or all shares, whichever is nearest to the captured one.
    """
    made, shares = torch.zeros_like(x), []
    for number, expert in enumerate(experts):
        own = weights[..., number] != 0
        if bool(own.any()):
            weight = weights[own][:, number, None]
            output = expert.output(x[own] * weight if weighted == "inputs" else x[own], hidden)
            share = output * weight if weighted == "outputs" else output
            made[own] += share
            shares += [(own, share)] if seen is not None else []
    return made if seen is None else _nearest(made, shares, seen)


def _nearest(made: Tensor, shares: Sequence[tuple[Tensor, Tensor]], seen: Tensor) -> Tensor:
    """Return for each token whichever is nearest to `seen`: its sum, its sum without one of the shares, or 0."""
    best = torch.where(((made - seen).norm(dim=-1) > seen.norm(dim=-1))[..., None], 0.0, made)
    for own, share in shares:
        without = made[own] - share
        is_nearer = (without - seen[own]).norm(dim=-1) < (best[own] - seen[own]).norm(dim=-1)
        best[own] = torch.where(is_nearer[:, None], without, best[own])
    return best
