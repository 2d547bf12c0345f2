"""Descriptions of what a component made of its inputs: each form planted with known numbers, and none where nothing differs."""

import math

import pytest
import torch

from parity_audit.diagnose.forms.described import described
from parity_audit.diagnose.forms.pair import ActualExpected

TOKENS, HEADS, D_HEAD = 40, 3, 8
CHANNELS = HEADS * D_HEAD


@pytest.fixture
def true():
    return torch.randn(TOKENS, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def noisy(x):
    noise = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return x * (1 + 1e-7 * noise)


def form(own, true, **others):
    return described(ActualExpected(own=own, true=true, d_head=D_HEAD, others=others))


def test_what_does_not_differ_has_no_form(true):
    assert form(true, true) is None
    assert form(noisy(true), true) is None


def test_noise_of_any_size_has_no_form(true):
    other = torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    assert form(true + 0.1 * other, true, resid_pre=other.roll(1, 0)) is None
    assert form(other, true) is None


def test_what_is_small_beside_the_truth_is_not_any_other_small_thing(true):
    small, other = (
        1e-4 * torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        for n in (11, 12)
    )
    assert form(small, true, resid_pre=other) is None
    assert form(small, true, resid_pre=small.clone()).value == "equal to resid_pre"


def test_nothing_is_said_of_numbers_that_are_not_finite(true):
    own = true.clone()
    own[3, 4] = math.nan
    assert form(own, true) is None


@pytest.mark.parametrize("factor", [0.5, 1.01, -1.0, 7.3])
def test_scale(true, factor):
    found = form(noisy(true * factor), true)
    assert (found.kind, found.where) == ("scale", "")
    assert found.value == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("shift", [3.0, -0.02])
def test_shift(true, shift):
    found = form(noisy(true) + shift, true)
    assert found.kind == "shift"
    assert found.value == pytest.approx(shift, rel=1e-5)


def test_clamp_names_only_the_bound_that_is_used(true):
    assert form(true.clamp(-0.5, 0.7), true).value == [-0.5, 0.7]
    assert form(true.clamp(max=0.7), true).value == [0.7]


@pytest.mark.parametrize("cap", [1.0, 5.0])
def test_softcap(true, cap):
    found = form(cap * torch.tanh(true / cap), true)
    assert found.kind == "softcap"
    assert found.value == pytest.approx(cap, rel=1e-4)


@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "sigmoid", "square"])
def test_a_curve_is_named(true, name):
    curve = {
        "square": torch.square,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "softplus": torch.nn.functional.softplus,
    }.get(name)
    found = form(noisy((curve or getattr(torch, name))(true)), true)
    assert (found.kind, found.value) == ("curve", name)


@pytest.mark.parametrize("value", [1.0, -0.3])
def test_one_number_everywhere(true, value):
    found = form(torch.full_like(true, value), true)
    assert (found.kind, found.value) == ("constant", pytest.approx(value))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_names_the_dtype(true, dtype):
    found = form(true.to(getattr(torch, dtype)).double(), true)
    assert (found.kind, found.value) == ("rounded", dtype)


def test_heads_that_are_normalised_and_have_a_gain(true):
    heads = true.view(-1, HEADS, D_HEAD)
    gain = torch.linspace(0.5, 2.0, D_HEAD, dtype=torch.float64)
    found = form((heads / heads.square().mean(-1, keepdim=True).sqrt() * gain).flatten(1), true)

    assert (found.kind, found.value) == ("norm", "each head normalised, times 0.5 to 2 per channel")
    assert found.share_left < 1e-12


ORDERS = {
    "heads [2, 0, 1]": lambda x: x.view(-1, HEADS, D_HEAD)[:, [2, 0, 1]].flatten(1),
    "(d_head head) for (head d_head)": lambda x: x.view(-1, HEADS, D_HEAD).transpose(1, 2).flatten(1),
    "reversed": lambda x: x.flip(1),
    "rolled by 1": lambda x: x.roll(1, 1),
    "neighbours exchanged": lambda x: x.view(-1, CHANNELS // 2, 2).flip(-1).flatten(1),
    "the same other order in every head: rolled by 1": lambda x: x.view(-1, HEADS, D_HEAD).roll(1, -1).flatten(1),
    "2 of 24 channels moved": lambda x: x[:, [5, 1, 2, 3, 4, 0, *range(6, CHANNELS)]],
}


@pytest.mark.parametrize("words", sorted(ORDERS))
def test_order(true, words):
    found = form(noisy(ORDERS[words](true)), true)
    assert (found.kind, found.value) == ("order", words)


def test_bias_and_gain_per_channel(true):
    vector = torch.randn(CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    assert form(true + vector, true).kind == "bias"
    assert form(true * vector, true).kind == "gain"


def test_normalised_tokens(true):
    found = form(true / true.square().mean(1, keepdim=True).sqrt(), true)
    assert (found.kind, found.value) == ("norm", "normalised to rms 1")


def test_normalised_heads(true):
    heads = true.view(TOKENS, HEADS, D_HEAD)
    found = form((heads / heads.square().mean(-1, keepdim=True).sqrt()).flatten(1), true)
    assert (found.kind, found.value) == ("norm", "each head normalised to rms 1")
    found = form(((heads - heads.mean(-1, keepdim=True)) / heads.std(-1, keepdim=True, correction=0)).flatten(1), true)
    assert (found.kind, found.value) == ("norm", "each head centred and normalised to rms 1")


def test_heads_that_are_normalised_are_not_said_to_be_scaled_where_they_have_nearly_one_size():
    directions = torch.randn(200, 4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    unit = directions / directions.norm(dim=-1, keepdim=True)
    sizes = 3 + 0.02 * torch.randn(200, 4, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    found = described(ActualExpected(own=unit.flatten(1), true=(sizes * unit).flatten(1), d_head=8))

    assert found is not None
    assert (found.kind, found.value) == ("norm", "each head normalised to rms 0.3536")


def test_one_channel_that_is_anothers(true):
    own = true.clone()
    own[:, 7] = true[:, 8]
    found = form(noisy(own), true)
    assert (found.kind, found.value) == ("order", "channel 7 holds channel 8")


def test_a_factor_per_token_is_not_said_of_one_channel(true):
    own = true.clone()
    own[:, 7] = torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(17))
    assert form(own, true) is None


def test_what_is_centred_and_nothing_else_is_said_so(true):
    found = form(true - true.mean(-1, keepdim=True), true)
    assert (found.kind, found.value) == ("norm", "centred")


@pytest.mark.parametrize(
    ("step", "words"), [(1, "those of 1 before"), (-1, "those of 1 after"), (2, "those of 2 before")]
)
def test_tokens_that_are_late(true, step, words):
    own = noisy(true.roll(step, 0))
    own[:2] = 0.0
    found = form(own, true)
    assert (found.kind, found.value) == ("position", words)


@pytest.mark.parametrize("rank", [1, 5])
def test_directions_that_are_taken_away(true, rank):
    basis, _ = torch.linalg.qr(
        torch.randn(CHANNELS, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(21))
    )
    found = form(noisy(true - true @ basis @ basis.T), true)
    assert (found.kind, found.value) == ("projection", f"without {rank} of {CHANNELS} directions")


def test_a_difference_of_low_rank_that_takes_nothing_away_is_no_projection(true):
    left, right = torch.randn(2, TOKENS, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(22))
    assert form(true + left[:, :1] @ right[:1], true) is None


def test_one_vector_for_many_tokens(true):
    assert form(true.mean(0).expand_as(true), true).value == f"1 vectors for {TOKENS} tokens"
    two = torch.cat([true[:20].mean(0).expand(20, -1), true[20:].mean(0).expand(TOKENS - 20, -1)])
    assert form(two, true).value == f"2 vectors for {TOKENS} tokens"


def test_tokens_that_are_alike_coincide_in_a_narrow_dtype_and_are_not_said_to_be_the_same(true):
    """A strong sink makes what attention adds nearly the same for all tokens; bfloat16 then makes it the same."""
    alike = true.mean(0) + 1e-6 * true

    found = form((1.01 * alike).bfloat16().double(), alike)

    assert found is None or found.kind != "constant"


def test_another_site_in_its_place_or_added(true):
    other = torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(13))
    assert form(noisy(other), true, resid_pre=other).value == "equal to resid_pre"
    assert form(torch.zeros_like(true), true, resid_pre=other).value == "zero"
    assert form(noisy(true - 0.25 * other), true, resid_pre=other).value == "the true value - 0.25 resid_pre"


def test_of_sites_that_are_multiples_of_each_other_the_plainest_is_named(true):
    other = torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(13))
    found = form(noisy(true - other), true, attn_out=0.22 * other, attn_proj=other, resid_pre=true - 0.22 * other)
    assert found.value == "the true value - 1 attn_proj"


def test_only_some_channels_or_tokens(true):
    own = true.clone()
    own[:, D_HEAD : 2 * D_HEAD] *= 0.5
    found = form(own, true)
    assert (found.kind, found.where) == ("scale", "heads 1")
    own = true.clone()
    own[30:] *= 1.1
    found = form(own, true)
    assert (found.kind, found.where) == ("scale", f"10 of {TOKENS} tokens")
    assert found.value == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("moved", "words"),
    [([5], "channel 5"), ([5, 6, 7], "channels 5 to 7"), ([5, 9], "channels 5, 9"), ([*range(D_HEAD)], "heads 0")],
)
def test_channels_in_words(true, moved, words):
    own = true.clone()
    own[:, moved] += 2.5
    assert form(own, true).where == words


def test_tokens_that_are_late_are_said_so_also_where_a_site_holds_the_same(true):
    own = true.roll(1, 0)

    found = form(own, true, **{"v of the token before": own})

    assert (found.kind, found.value) == ("position", "those of 1 before")


def test_what_is_gone_is_zero_and_not_late(true):
    assert form(torch.zeros_like(true), true).value == "zero"


@pytest.mark.parametrize(("low", "words"), [(-1e9, "-1e+09"), (-math.inf, "-inf")])
def test_logits_that_a_sampler_has_cut(true, low, words):
    kept = true >= true.topk(5, -1).values[:, -1:]
    found = form(torch.where(kept, true, low), true)

    assert (found.kind, found.value) == ("hidden", f"{words} but at the 5 largest")


@pytest.mark.parametrize("name", ["log_softmax", "softmax"])
def test_probabilities_in_the_place_of_logits(true, name):
    found = form(noisy(getattr(4.0 * true, name)(-1)), 4.0 * true)
    assert (found.kind, found.value) == ("curve", name)


def quantised(x, kind):
    """By the largest number of each row of `x`, as dynamic quantisation does."""
    top = x.abs().amax(-1, keepdim=True)
    if kind.startswith("int"):
        step = top / {"int8": 127, "int4": 7}[kind]
        return (x / step).round() * step
    scale = top / torch.finfo(getattr(torch, kind)).max
    return (x / scale).to(getattr(torch, kind)).double() * scale


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("part", ["tensor", "token", "head"])
def test_rounded_times_a_scale(kind, part):
    """One scale of all, of each token, or of each head of a token; float32 keeps the product."""
    true = torch.randn(TOKENS, HEADS, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shapes = {"tensor": (-1,), "token": (TOKENS, -1), "head": (TOKENS, HEADS, 32)}
    own = quantised(true.reshape(shapes[part]), kind).reshape(TOKENS, -1).float().double()

    found = described(ActualExpected(own=own, true=true.reshape(TOKENS, -1), d_head=32))
    assert (found.kind, found.value) == ("rounded", f"{kind} times a scale")


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_what_is_on_a_grid_and_not_next_to_the_truth_is_not_rounded(kind, true):
    other = torch.randn(true.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    assert form(quantised(other, kind), true) is None


def test_a_few_weights_among_zeros_are_on_no_grid():
    """The weights of three experts of sixteen have three mantissas, whatever they are."""
    draw = torch.Generator().manual_seed(12)
    chosen = torch.rand(TOKENS, 16, generator=draw).topk(3, -1).indices
    true = torch.zeros(TOKENS, 16, dtype=torch.float64)
    true.scatter_(1, chosen, torch.rand(TOKENS, 3, dtype=torch.float64, generator=draw) + 0.5)
    own = true * (1 + 0.1 * torch.rand(true.shape, dtype=torch.float64, generator=draw))

    found = described(ActualExpected(own=own, true=true, d_head=0))
    assert found is None or found.kind != "rounded"


@pytest.mark.parametrize("channels", [1, 2])
def test_one_or_two_numbers_of_a_token_are_on_any_grid_and_not_said_to_be_rounded(channels, true):
    own = true.clone()
    own[:, :channels] *= 1.01

    found = described(ActualExpected(own=own, true=true, d_head=0))
    assert found is not None
    assert (found.kind, float(found.value)) == ("scale", pytest.approx(1.01))
