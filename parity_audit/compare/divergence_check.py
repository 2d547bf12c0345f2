"""Identify which divergence a user's function computes, to test generalized Jensen-Shannon implementations.

The function is called on small fixed distributions for several weights, in every calling convention that training code
uses: logits, log-probabilities or probabilities; teacher or student first; per position, summed or averaged. The
candidate formula and the convention that reproduce its values best are reported, if they reproduce every value.
Identities (zero on equal inputs, symmetry at 1/2, the endpoints) cannot distinguish these formulas; values at weights
inside (0, 1) can.
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
"""Weights at which the function is called; only at 1/2 do two of the formulas agree."""
TOLERANCE = 1e-3
"""Relative tolerance of a match: float32 rounding is 1e-6 on these inputs, and the formulas differ by at least 8 % of
the largest value."""
SIZES = (3, 7)
"""Number of positions and size of the vocabulary of the test distributions."""
RIGHT = "the generalized Jensen-Shannon divergence"

Formula = Callable[[Tensor, Tensor, float], Tensor]


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Use a mixture of log-probabilities, which gives beta (1 - beta) (KL(p||q) + KL(q||p)), a Jeffreys divergence."""
    return beta * (1.0 - beta) * (kl_divergence(p, q) + kl_divergence(q, p))


def _swapped_weights(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Use the right mixture, with the weights of the two KL terms exchanged."""
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
    """The formula that the function computes (None if no formula fits), and its calling convention.

    `values` are the function's own values at the weights, under the convention that fits best.
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
    """Find the formula that reproduces `function(first, second, beta)` at every weight, on `[1, pos, d_vocab]`.

    A first parameter that is named like a student or a teacher determines the order; otherwise both orders are tried.
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
    """The function's value as float64; beta is passed by name if the function has such a parameter."""
    by_name = {"beta": beta} if "beta" in inspect.signature(function).parameters else {}
    arguments = (first[None].float(), second[None].float(), *(() if by_name else (beta,)))
    value = torch.as_tensor(function(*arguments, **by_name)).detach().double()
    if not bool(value.isfinite().all()):
        raise ValueError(f"not finite at beta {beta}")
    return value


def _fits(
    values: Mapping[float, Tensor], teacher: Tensor, student: Tensor, inputs: str, order: str
) -> Iterator[Checked]:
    """Yield every formula and reduction whose values have the function's shape, with the largest relative deviation."""
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
