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


@pytest.mark.parametrize(
    ("margin", "more", "taken"),
    [(8.0, 0, True), (160.0, 0, False), (8.0, 1, False)],
    ids=["within rounding", "decided", "one expert more"],
)
def test_weights_that_are_shown_say_which_experts_were_chosen(margin: float, more: int, taken: bool):
    """Of several experts within rounding the ones that the side chose are imposed, however little they weigh."""
    own, few = probe(length=TOKENS), torch.zeros(1, TOKENS, dtype=torch.bool)
    few[:, FEW] = True
    exact = torch.arange(EXPERTS, 0, -1).double().repeat(1, TOKENS, 1)
    exact[few, LAST:] = exact[few, LAST][:, None] - margin * ROUNDING * torch.arange(EXPERTS - LAST)
    third = exact.clone()
    third[few, LAST], third[few, NEXT + 1] = exact[few, NEXT + 1], exact[few, LAST]
    weights = torch.where(few[..., None], route(0, third), route(0, exact))
    weights[few, EXPERTS - 1] = 0.1 * more
    judge, floor = (Held(own, {LOGITS: logits, WEIGHTS: route(0, exact)}) for logits in (exact, exact + ROUNDING))

    choices = list(other_choices(Held(own, {WEIGHTS: weights}), judge, Pair(judge=judge, floor=floor), own, route))

    assert [torch.equal(choice.taken, few) for choice in choices] == ([True] if taken else [])
    for choice in choices:
        assert torch.allclose(choice.weights, weights, rtol=0, atol=16 * ROUNDING)
        assert torch.equal(choice.weights != 0, weights != 0)


def test_logits_that_tie_are_moved_by_a_thousandth_of_their_rounding():
    own = probe(length=TOKENS)
    exact = torch.tensor([3.0, 1.0, 1.0, *[0.0] * (EXPERTS - 3)], dtype=torch.float64).repeat(1, TOKENS, 1)
    other = exact.clone()
    other[..., NEXT] += 1.0
    judge, floor = (Held(own, {LOGITS: logits, WEIGHTS: route(0, exact)}) for logits in (exact, exact + ROUNDING))

    (choice,) = other_choices(
        Held(own, {WEIGHTS: route(0, other)}), judge, Pair(judge=judge, floor=floor), own, route
    )  # fmt: skip

    moved = 2.0 - (choice.weights[..., 0] / choice.weights[..., NEXT]).log()
    assert moved.flatten().tolist() == pytest.approx([1e-3 * ROUNDING] * TOKENS, rel=0.1)


def test_a_choice_that_was_imposed_is_no_other_one():
    own = probe(length=TOKENS)
    exact = torch.tensor([3.0, 1.0, 1.0, *[0.0] * (EXPERTS - 3)], dtype=torch.float64).repeat(1, TOKENS, 1)
    weights = torch.zeros_like(exact)
    weights[..., [0, NEXT]] = 0.5
    judge = Held(own, {LOGITS: exact, WEIGHTS: weights})

    assert list(other_choices(judge, judge, Pair(judge=judge, floor=judge), own, route)) == []


def test_a_router_that_does_not_go_by_size_is_followed_too():
    """Experts of the largest absolute logits."""
    own = probe(length=TOKENS)
    exact = torch.tensor([3.0, -2.0, 2.0 - ROUNDING, *[0.1] * (EXPERTS - 3)], dtype=torch.float64).repeat(1, TOKENS, 1)
    other = exact.clone()
    other[..., LAST] += 2 * ROUNDING

    def by_magnitude(layer: int, logits: torch.Tensor) -> torch.Tensor:
        best = logits.abs().topk(CHOSEN, -1).indices
        return torch.zeros_like(logits).scatter(-1, best, 0.5)

    judge, floor = (
        Held(own, {LOGITS: logits, WEIGHTS: by_magnitude(0, exact)}) for logits in (exact, exact + ROUNDING)
    )
    side = Held(own, {WEIGHTS: by_magnitude(0, other)})

    (choice,) = other_choices(side, judge, Pair(judge=judge, floor=floor), own, by_magnitude)

    assert bool(choice.taken.all())
    assert torch.equal(choice.weights, by_magnitude(0, other))
