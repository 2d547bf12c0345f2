"""Which divergence does somebody's own function compute? A test of generalized Jensen-Shannon implementations.

The function is called on small fixed distributions for several weights, in every calling convention that training code
uses: logits, log-probabilities or probabilities; teacher or student first; per position, summed or averaged. Each
candidate formula that reproduces every value under one convention is reported. Identities (zero on equal inputs, symmetry
at 1/2, the endpoints) cannot tell these formulas apart; values at weights inside (0, 1) can.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.compare.divergences import generalized_jsd, kl_divergence

BETAS = (0.1, 0.3, 0.5, 0.9)
"""Weights at which the function is asked; only at 1/2 do two of the formulas agree."""
TOLERANCE = 1e-3
"""Relative; float32 leaves 1e-6 on these inputs, and the formulas differ by at least 8 % of the largest value."""
SIZES = (3, 7)
"""Positions and vocabulary of the test distributions."""
RIGHT = "the generalized Jensen-Shannon divergence"

Formula = Callable[[Tensor, Tensor, float], Tensor]


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The mixture taken of log-probabilities: beta (1 - beta) (KL(p||q) + KL(q||p)), a Jeffreys divergence."""
    return beta * (1.0 - beta) * (kl_divergence(p, q) + kl_divergence(q, p))


def _swapped_weights(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The right mixture, with the two KL terms' weights exchanged."""
    log_m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return (1.0 - beta) * kl_divergence(p, log_m) + beta * kl_divergence(q, log_m)


FORMULAS: Mapping[str, Formula] = {
    RIGHT: generalized_jsd,
    "log-mixture: the mixture is of log-probabilities, which gives a Jeffreys divergence": _log_mixture,
    "swapped weights: beta and 1 - beta are exchanged on the two KL terms": _swapped_weights,
    "KL(teacher || student), whatever beta is": lambda p, q, beta: kl_divergence(p, q),
    "KL(student || teacher), whatever beta is": lambda p, q, beta: kl_divergence(q, p),
    "beta KL(teacher || student) + (1 - beta) KL(student || teacher), without a mixture": (
        lambda p, q, beta: beta * kl_divergence(p, q) + (1.0 - beta) * kl_divergence(q, p)
    ),
}
REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "one value per position": lambda values: values,
    "the sum over positions": lambda values: values.sum(),
    "the mean over positions": lambda values: values.mean(),
}
INPUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda log_p: log_p + 2.5,
    "log-probabilities": lambda log_p: log_p,
    "probabilities": lambda log_p: log_p.exp(),
}
STUDENT = ("student", "q", "pred", "policy", "model")
TEACHER = ("teacher", "p", "target", "ref")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the function computes, None where no formula fits, and how it wants to be called.

    `values` are its own values at the weights asked for, under the convention found or the first that ran.
    """

    computes: str | None
    inputs: str = ""
    order: str = ""
    reduction: str = ""
    worst: float = math.inf
    values: tuple[tuple[float, float], ...] = ()
    problem: str = ""

    @property
    def right(self) -> bool:
        """Whether it is the generalized Jensen-Shannon divergence."""
        return self.computes == RIGHT


def check_divergence(function: Callable[..., Any]) -> Checked:
    """Find the formula that reproduces `function(first, second, beta)` on every weight; tensors are `[1, pos, d_vocab]`.

    A parameter named like a student or a teacher settles the order; else both are tried.
    """
    teacher, student = _distributions()
    problems: list[str] = []
    best: Checked | None = None
    for (inputs, make), order in itertools.product(INPUTS.items(), _orders(function)):
        pair = (student, teacher) if order == "student, teacher" else (teacher, student)
        try:
            values = {beta: _called(function, make(pair[0]), make(pair[1]), beta) for beta in BETAS}
        except Exception as error:  # a user's function may raise anything
            problems.append(f"{type(error).__name__}: {error}")
            continue
        for checked in _fits(values, teacher, student, inputs, order):
            best = checked if best is None or checked.worst < best.worst else best
    if best is None:
        return Checked(computes=None, problem=problems[0] if problems else "it returned no finite number")
    if best.worst <= TOLERANCE:
        return best
    return Checked(computes=None, worst=best.worst, values=best.values, problem="no known formula gives these values")


def _distributions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [2.0 * torch.randn(SIZES, generator=generator, dtype=torch.float64) for _ in range(2)]
    return drawn[0].log_softmax(-1), drawn[1].log_softmax(-1)


def _orders(function: Callable[..., Any]) -> tuple[str, ...]:
    names = [*inspect.signature(function).parameters]
    first = names[0].lower() if names else ""
    if first.startswith(STUDENT) and not first.startswith(TEACHER):
        return ("student, teacher",)
    return ("teacher, student",) if first.startswith(TEACHER) else ("teacher, student", "student, teacher")


def _called(function: Callable[..., Any], first: Tensor, second: Tensor, beta: float) -> Tensor:
    """The function's value as float64; beta by name where it has such a parameter."""
    by_name = {"beta": beta} if "beta" in inspect.signature(function).parameters else {}
    arguments = (first[None].float(), second[None].float(), *(() if by_name else (beta,)))
    value = torch.as_tensor(function(*arguments, **by_name)).detach().double()
    if not bool(value.isfinite().all()):
        raise ValueError(f"not finite at beta {beta}")
    return value


def _fits(
    values: Mapping[float, Tensor], teacher: Tensor, student: Tensor, inputs: str, order: str
) -> Iterator[Checked]:
    """Every formula and reduction whose shape is that of the values, with its largest relative deviation."""
    shown = tuple((beta, float(value.sum())) for beta, value in values.items())
    for (name, formula), (reduction, reduce) in itertools.product(FORMULAS.items(), REDUCTIONS.items()):
        expected = {beta: reduce(formula(teacher, student, beta)) for beta in values}
        if any(_flat(values[beta]).shape != _flat(expected[beta]).shape for beta in values):
            continue
        worst = max(
            float(((_flat(values[beta]) - _flat(expected[beta])) / _flat(expected[beta])).abs().max())
            for beta in values
        )
        yield Checked(computes=name, inputs=inputs, order=order, reduction=reduction, worst=worst, values=shown)


def _flat(value: Tensor) -> Tensor:
    """Per-position values in one row; a function that keeps the vocabulary axis is summed over it."""
    if value.ndim >= 2 and value.shape[-1] == SIZES[1]:
        value = value.sum(-1)
    return value.flatten()
