"""Limits of a diagnosis from both sides: what lies a few times within each, and a few times beyond it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from loose import SHORT, differ, loose
from test_extent import said
from test_findings import fit

from parity_audit.diagnose.agreement import FitPair, differs, same
from parity_audit.diagnose.confidence import REMAINDER
from parity_audit.diagnose.describe import _even
from parity_audit.diagnose.extent import Tokens
from parity_audit.diagnose.findings import _marks
from parity_audit.diagnose.fit import site_residual
from parity_audit.diagnose.fit.by_pair import Layout, _with_factor, laws, read_off
from parity_audit.diagnose.fit.settings import Explanation
from parity_audit.diagnose.forms.described import _whole_heads, described
from parity_audit.diagnose.forms.kinds import _projected
from parity_audit.diagnose.forms.order import order_of
from parity_audit.diagnose.forms.pair import ActualExpected as Tensors
from parity_audit.diagnose.numerics import tf32_share
from parity_audit.diagnose.returned import _far
from parity_audit.formulas.alibi import standard_slopes, times_usual

G = torch.Generator().manual_seed(3)


@pytest.mark.parametrize(("sigmas", "apart"), [(3.0, False), (12.0, True)])
def test_standard_errors_between_two_values(sigmas, apart):
    own, other = fit(16.0, stderr=0.01), fit(16.0 + sigmas * 0.01 * 2**0.5, stderr=0.01)

    assert differs(FitPair(candidate=own, reference=other)) is apart


@pytest.mark.parametrize(("factor", "alike"), [(1.003, True), (1.03, False)])
def test_numbers_of_a_value_with_parts(factor, alike):
    assert same({"factor": 8.0, "type": "yarn"}, {"factor": 8.0 * factor, "type": "yarn"}) is alike


@pytest.mark.parametrize(("off", "even"), [(3e-6, True), (3e-5, False)])
def test_an_even_pattern(off, even):
    assert _even(torch.tensor([[0.5 + off, 0.5 - off], [1.0, 0.0]], dtype=torch.float64)) is even


@pytest.mark.parametrize(("roundings", "wrong"), [(20, False), (200, True)])
def test_the_roundings_from_which_a_token_is_wrong(roundings, wrong):
    """Each number moves by so many roundings of the largest number of a token, which is about twice as large as most."""
    words = said(lambda of, position, row: position >= 20, by=1 + roundings * 2.0**-23)

    assert (words is not None) is wrong


@pytest.mark.parametrize(("wrong", "strays", "rule"), [(500, 5, True), (500, 30, False), (40, 2, True), (40, 8, False)])
def test_tokens_that_a_rule_may_get_wrong(wrong, strays, rule):
    at = torch.arange(1000)
    tokens = Tokens(**{name: at for name in Tokens.__dataclass_fields__ if name != "wrong"}, wrong=at < wrong + strays)

    assert tokens.is_where(at < wrong) is rule


@pytest.mark.parametrize(
    ("knob", "roundings", "explained"),
    [("residual.repeated", 8.0, True), ("residual.repeated", 100.0, False), ("residual.skipped", 8.0, False)],
)
def test_what_a_block_that_is_run_once_more_may_leave(knob, roundings, explained):
    found = Explanation(values={knob: "another"}, residual=roundings * 1e-7)

    assert site_residual.explains(SimpleNamespace(), (), found, limit=1e-7) is explained


@pytest.mark.parametrize(
    ("own", "others", "marked"), [(1e-5, 0.0, False), (5e-5, 0.0, True), (2e-3, 1e-3, False), (1e-2, 1e-3, True)]
)
def test_what_a_value_leaves_beside_what_the_other_sides_leaves(own, others, marked):
    pair = SimpleNamespace(
        candidate=SimpleNamespace(residual=own, evidence={}), reference=SimpleNamespace(residual=others, evidence={}), sigmas=99.0
    )  # fmt: skip

    assert (REMAINDER in list(_marks([pair]))) is marked


@pytest.mark.parametrize(("factor", "named"), [(1.00003, False), (1.0003, True)])
def test_a_factor_that_a_scaling_does_not_imply(factor, named):
    assert (_with_factor(None, factor) is not None) is named


def test_frequencies_of_a_text_are_read_off_a_grid_that_is_fine_enough():
    frequencies, places = torch.tensor([1.3, 0.71, 0.113, 0.0131], dtype=torch.float64), torch.arange(400)
    x = torch.randn(400, 2, 4, generator=G, dtype=torch.float64)
    pairs = torch.complex(x[:, 0], x[:, 1])

    def turned(own: torch.Tensor) -> torch.Tensor:
        made = pairs * torch.exp(1j * places[:, None] * own)
        return torch.cat([made.real, made.imag], -1)

    def difference(scaling: dict[str, object]) -> torch.Tensor:
        own = scaling["attention_factor"] * turned(torch.tensor(scaling["inv_freq"], dtype=torch.float64))
        return (own - turned(frequencies)).flatten()

    found = read_off(Layout(d_head=8, first=0, pairs=4, pairing="half"), difference, 399, 1.0)

    assert found["inv_freq"] == pytest.approx(frequencies.tolist(), rel=1e-9)


def test_a_pair_that_does_not_turn_is_in_the_law_of_those_that_do():
    """Proportional scaling: half of the pairs have the frequencies of a base, the others none."""
    base = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    table = {"inv_freq": [*base[:4].tolist(), *[0.0] * 4], "attention_factor": 1.0}
    said_by_spec = {"rope.theta": 500.0, "rope.scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}

    assert any(law.get("rope.theta") == pytest.approx(1e4, rel=1e-6) for law in laws(table, said_by_spec, 48))


@pytest.mark.parametrize(("noise", "found"), [(2e-4, True), (5e-3, False)])
def test_channels_that_are_nearly_others(noise, found):
    true = torch.randn(40, 32, generator=G, dtype=torch.float64)
    own = true.roll(1, 1) + noise * torch.randn(40, 32, generator=G, dtype=torch.float64)

    assert (order_of(own, true, 8) is not None) is found


def test_channels_of_few_directions_are_told_apart():
    """In one random direction alone some of four thousand channels would be as near to others as to themselves."""
    true = torch.randn(40, 4096, generator=G, dtype=torch.float64)

    assert order_of(true.flip(1), true, 8)[0] == "reversed"


@pytest.mark.parametrize(("wrong", "whole"), [(6, True), (1, False)])
def test_channels_of_a_head_that_stand_for_all_of_them(wrong, whole):
    channels = torch.arange(16) < wrong

    assert int(_whole_heads(channels, 8).sum()) == (8 if whole else wrong)


@pytest.mark.parametrize(("off", "differs_at_all"), [(3e-6, False), (5e-5, True)])
def test_tensors_that_do_not_differ_have_no_description(off, differs_at_all):
    true = torch.randn(40, 32, generator=G, dtype=torch.float64)

    assert (described(Tensors(own=true * (1 + off), true=true, d_head=8)) is not None) is differs_at_all


@pytest.mark.parametrize(("noise", "few"), [(3e-4, True), (3e-3, False)])
def test_rounding_is_no_direction_of_a_difference(noise, few):
    """The difference is one direction, and noise whose singular values are such a share of its size."""
    true = torch.randn(40, 32, generator=G, dtype=torch.float64)
    direction = torch.nn.functional.normalize(torch.randn(32, generator=G, dtype=torch.float64), dim=0)
    apart = -(true @ direction)[:, None] * direction
    grain = torch.linalg.qr(torch.randn(40, 32, generator=G, dtype=torch.float64)).Q * float(apart.norm())

    assert (_projected(Tensors(own=true + apart + noise * grain, true=true, d_head=8)) is not None) is few


def test_the_size_of_a_walk_of_tf32_products():
    """4 * 2^-11 * sqrt(7), as the docstring has it, in the first block."""
    assert tf32_share(SimpleNamespace(layer=0)) == pytest.approx(0.0051675, rel=1e-4)


@pytest.mark.parametrize(("roundings", "far"), [(5, False), (50, True)])
def test_roundings_behind_the_last_hook(roundings, far):
    hooked = torch.tensor([1.0, -0.5], dtype=torch.float64)

    assert _far(hooked, hooked + roundings * 2.0**-23, "float32") is far


@pytest.mark.parametrize(("noise", "named"), [(3e-5, True), (5e-4, False)])
def test_embeddings_that_are_nearly_the_rows_of_other_tokens(noise, named):
    table, own = torch.randn(131, 64, generator=G), torch.tensor(SHORT[0].token_ids)
    grain = torch.nn.functional.normalize(torch.randn(*own.shape, 64, generator=G), dim=-1)
    moved = table[(own + 1) % 131]
    sides = [
        loose({"embed": rows}, weights={"embed": table}, probes=SHORT[:1], layer=None)
        for rows in (moved + noise * moved.norm(dim=-1, keepdim=True) * grain, table[own])
    ]

    assert ("embed.rows" in differ(*sides)) is named


def test_a_small_difference_that_no_cause_explains_is_no_scale():
    x, weight = torch.randn(1, 48, 64, generator=G), torch.randn(64, 64, generator=G) / 8
    right = x @ weight.T
    wrong = right + 0.03 * right.square().mean().sqrt() * torch.randn(1, 48, 64, generator=G)
    sides = [
        loose({"z": x.unflatten(-1, (4, 16)), "attn_proj": y}, weights={"attn.o": weight}, probes=SHORT[:1])
        for y in (wrong, right)
    ]

    assert {knob: finding.candidate_value for knob, finding in differ(*sides).items()} == {
        "weights.attn.o": "not the checkpoint's"
    }


@pytest.mark.parametrize(("leaves", "explained"), [(0.1, True), (0.9, False)])
def test_what_a_narrow_dtype_may_leave_where_all_else_leaves_ten_times_as_much(monkeypatch, leaves, explained):
    even = torch.full((64,), 1 / 8, dtype=torch.float64)
    decoder = SimpleNamespace(dims={"n_layers": 1}, values={}, knob=lambda name, layer: None)
    monkeypatch.setattr(
        site_residual,
        "combined_difference",
        lambda residuals, parts, values: even * leaves * (1 if values.get("norm.dtype") else 10),
    )
    narrow = Explanation(values={"norm.dtype": "bfloat16 throughout"}, residual=leaves)

    assert (
        site_residual.explains(SimpleNamespace(decoder=decoder), [SimpleNamespace(layer=0)], narrow, 1e-7) is explained
    )


@pytest.mark.parametrize(("off", "even"), [(4e-3, True), (0.03, False)])
def test_slopes_that_are_nearly_a_multiple_of_the_usual_ones(off, even):
    slopes = [2.0 * slope * (1 + off * (-1) ** head) for head, slope in enumerate(standard_slopes(8))]

    assert (times_usual(slopes) is not None) is even
