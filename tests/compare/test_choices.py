"""Choices of experts that rounding decides, against logits whose margins are known."""

import pytest
import torch
from held import Held, probe

from parity_audit.compare.choices import Pair, other_choices
from parity_audit.compare.floor import dtype_eps

TOKENS, EXPERTS, CHOSEN = 64, 8, 2
ROUNDING = 1e-6
LOGITS, WEIGHTS, OUT = "blocks.0.mlp.router_logits", "blocks.0.mlp.router_weights", "blocks.0.mlp_out"
LAST, NEXT = CHOSEN - 1, CHOSEN
"""The experts between which the choice is made: logits fall with the number of the expert."""


def route(layer, logits):
    """A softmax over the largest logits."""
    best = logits.topk(CHOSEN, -1)
    return torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))


def found(margin, error, tokens=slice(None)):
    """The other choices where the two experts' logits are `margin` roundings apart and a side is off by `error` usual errors."""
    own = probe(length=TOKENS)
    exact = torch.arange(EXPERTS, 0, -1).double().repeat(1, TOKENS, 1)
    exact[:, tokens, NEXT] = exact[:, tokens, LAST] - margin * ROUNDING
    draw = torch.Generator().manual_seed(0)
    rounded = exact + ROUNDING * torch.randn(exact.shape, generator=draw, dtype=torch.float64).sign()
    made = torch.randn(1, TOKENS, 16, generator=draw, dtype=torch.float64)
    usual = 100 * dtype_eps("float32")
    off = torch.full((1, TOKENS, 1), usual)
    off[:, tokens] *= error
    judge = Held(own, {LOGITS: exact, OUT: made})
    floor = Held(own, {LOGITS: rounded, OUT: made + usual})
    side = Held(own, {OUT: made + off})
    return exact, list(other_choices(side, judge, Pair(judge=judge, floor=floor), own, route))


FEW = slice(3, 50, 7)


@pytest.mark.parametrize(
    ("margin", "error", "taken"),
    [(0.0, 30.0, True), (8.0, 30.0, True), (8.0, 8.0, False), (160.0, 30.0, False)],
    ids=["a tie", "within rounding", "no larger error than elsewhere", "decided"],
)
def test_a_choice_is_another_one_where_it_is_undecided_and_its_error_stands_out(margin, error, taken):
    _, choices = found(margin, error, FEW)

    expected = torch.zeros(1, TOKENS, dtype=torch.bool)
    expected[:, FEW] = taken
    assert [torch.equal(choice.taken, expected) for choice in choices] == ([True] if taken else [])


def test_its_weights_are_those_of_the_same_logits_with_the_other_expert():
    exact, (choice,) = found(8.0, 30.0, FEW)

    exchanged = exact.clone()
    exchanged[..., [LAST, NEXT]] = exact[..., [NEXT, LAST]]
    own = choice.weights[choice.taken]
    assert (own[:, LAST] == 0).all()
    assert torch.allclose(own, route(0, exchanged)[choice.taken], rtol=0, atol=8 * ROUNDING)
    assert choice.site == "blocks.0.mlp.router_weights"


def test_a_side_that_is_wrong_everywhere_took_no_other_choice():
    _, choices = found(8.0, 1e6)

    assert choices == []


@pytest.mark.parametrize(("dtype", "taken"), [("float32", False), ("bfloat16", True)])
def test_weights_show_a_choice_that_a_narrower_dtype_leaves_open(dtype: str, taken: bool):
    """What the experts made is no sign where their weights are replayed; the weights themselves are."""
    own, few = probe(length=TOKENS), torch.zeros(1, TOKENS, dtype=torch.bool)
    few[:, FEW] = True
    exact = torch.arange(EXPERTS, 0, -1).double().repeat(1, TOKENS, 1)
    exact[few, NEXT] = exact[few, LAST] - dtype_eps("bfloat16")
    other = exact.clone()
    other[few] = exact[few][:, [0, NEXT, LAST, *range(NEXT + 1, EXPERTS)]]
    right, weights = (route(0, logits) for logits in (exact, exact.bfloat16().double()))
    weights[few] = route(0, other)[few]
    judge = Held(own, {LOGITS: exact, WEIGHTS: right, OUT: torch.ones(1, TOKENS, 16)})
    side = Held(own, {WEIGHTS: weights, OUT: torch.ones(1, TOKENS, 16)})

    choices = list(other_choices(side, judge, Pair(judge=judge, floor=judge), own, route, dtype))

    assert [torch.equal(choice.taken, few) for choice in choices] == ([True] if taken else [])
