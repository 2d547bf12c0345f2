"""What becomes of the scores: every law planted by hand in float32 and named by the formula of z."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, explained, loose
from tiny_port import probe

KNOB = "attention.weights"
POS, HEADS, KV, WIDTH = 48, 4, 2, 16
Q, K, V = (
    torch.randn(1, POS, heads, WIDTH, generator=torch.Generator().manual_seed(seed))
    for seed, heads in enumerate((HEADS, KV, KV))
)
SEEN = torch.ones(POS, POS, dtype=torch.bool).tril()


def softmax(s):
    return s.masked_fill(~SEEN, -torch.inf).softmax(-1)


def softmax_with(more, s):
    return s.exp() * SEEN / (more + (s.exp() * SEEN).sum(-1, keepdim=True))


LAWS = {
    "softmax over queries": lambda s: s.masked_fill(~SEEN, -torch.inf).softmax(-2),
    "softmax over heads": lambda s: s.masked_fill(~SEEN, -1e30).softmax(1),
    "softmax twice": lambda s: softmax(softmax(s)),
    "sigmoid of the scores": lambda s: torch.sigmoid(s) * SEEN,
    "relu of the scores": lambda s: torch.relu(s) * SEEN,
    "squared relu of the scores": lambda s: torch.relu(s) ** 2 * SEEN,
    "the scores themselves": lambda s: s * SEEN,
    "exp of the scores": lambda s: s.exp() * SEEN,
    "softmax with 1 added to the sum": lambda s: softmax_with(1.0, s),
}


def side(law=softmax, *, scale=4.0, cap=None, clamp=None, spec_cap=None, window=None):
    k, v = (x.repeat_interleave(HEADS // KV, 2) for x in (K, V))
    scores = torch.einsum("bihd,bjhd->bhij", Q, k) / scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if clamp is None else scores.clamp(-clamp, clamp)
    sites = {"rot_q": Q, "rot_k": K, "v": V, "z": torch.einsum("bhij,bjhd->bihd", law(scores), v)}
    return loose(sites, probes=SHORT[:1], attention__scale=4.0, attention__softcap=spec_cap, attention__window=window)


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_another_law_is_named(name, cap):
    findings = explained(side(LAWS[name], cap=cap, spec_cap=cap), side(cap=cap, spec_cap=cap))

    assert (findings[KNOB].candidate_value, findings[KNOB].reference_value) == (name, "softmax")


@pytest.mark.parametrize("more", [0.01, 0.25, 7.5])
def test_a_number_that_is_added_to_the_sum_of_a_softmax_is_read(more):
    finding = explained(side(lambda s: softmax_with(more, s)), side())[KNOB]

    words, number = finding.candidate_value.split(" with ")[0], float(finding.candidate_value.split()[2])
    assert (words, finding.candidate_value.split(" ", 3)[3]) == ("softmax", "added to the sum")
    assert number == pytest.approx(more, rel=1e-3)


@pytest.mark.parametrize(("spec_cap", "bound"), [(None, 1.5), (20.0, 2.0), (None, 0.7)])
def test_scores_that_are_cut_off_where_a_soft_cap_would_bend_them(spec_cap, bound):
    findings = explained(side(clamp=bound, spec_cap=spec_cap), side(cap=spec_cap, spec_cap=spec_cap))

    assert findings.keys() == {"attention.softcap"}
    said = findings["attention.softcap"].candidate_value
    assert said.startswith("clamped at ")
    assert float(said.removeprefix("clamped at ")) == pytest.approx(bound, rel=1e-4)


def test_softmax_with_another_scale_is_not_another_law():
    findings = explained(side(scale=5.0), side())

    assert findings.keys() == {"attention.scale"}
    assert findings["attention.scale"].candidate_value == pytest.approx(5.0, rel=1e-4)


@pytest.mark.parametrize("window", [None, 4096])
def test_softmax_is_softmax(window):
    assert explained(side(window=window), side(window=window)) == {}


def test_a_softmax_over_queries_is_named_behind_a_finite_mask_in_padded_and_long_texts():
    """Padding, which the mask hides from all queries alike, has equal weight in each of them; every query of a long text counts."""
    probes = (*SHORT, probe("long", (400,), sites="residual", seed=5))

    def side(axis):
        held = {}
        for number, one in enumerate(probes):
            draw = torch.Generator().manual_seed(number)
            real = torch.tensor(one.mask).bool()
            q, k, v = (torch.randn(*real.shape, HEADS, WIDTH, generator=draw) for _ in range(3))
            seen = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril() & real[:, None, None]
            scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4.0 + torch.where(
                seen, 0.0, torch.finfo(torch.float32).min
            )
            sites = {"rot_q": q, "rot_k": k, "v": v, "z": pattern_times(scores.softmax(axis), v)}
            held |= {(one.name, site): x for site, x in sites.items()}
        return loose(held, probes=probes, attention__scale=4.0)

    findings = explained(side(-2), side(-1))

    assert {knob: one.candidate_value for knob, one in findings.items()} == {KNOB: "softmax over queries"}


def pattern_times(pattern, v):
    return torch.einsum("bhij,bjhd->bihd", pattern, v)


@pytest.mark.parametrize("factor", [1.004, 1.0003])
def test_a_factor_of_one_head_is_said(factor):
    v = V.repeat_interleave(HEADS // KV, 2)
    scores = torch.einsum("bihd,bjhd->bhij", Q, K.repeat_interleave(HEADS // KV, 2)) / 4.0
    pattern = softmax(scores)
    z = pattern_times(pattern, v) * torch.tensor([1.0, 1.0, factor, 1.0])[:, None]
    sites = {"rot_q": Q, "rot_k": K, "v": V, "attn_scores": scores.masked_fill(~SEEN, -torch.inf), "pattern": pattern}
    candidate, reference = (
        loose(sites | {"z": x}, probes=SHORT[:1], attention__scale=4.0) for x in (z, pattern_times(pattern, v))
    )

    findings = explained(candidate, reference)

    assert findings.keys() == {"attention.heads"}
    assert findings["attention.heads"].candidate_value == pytest.approx([1.0, 1.0, factor, 1.0], rel=1e-5)


def test_a_mask_that_is_lost_is_told_from_one_that_hides_padding_alone():
    short, ragged = SHORT
    real = torch.tensor(ragged.mask).bool()
    rows, length = real.shape
    draw = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(rows, length, heads, WIDTH, generator=draw) for heads in (HEADS, KV, KV))

    def side(seen):
        held = {(ragged.name, "rot_q"): q, (ragged.name, "rot_k"): k, (ragged.name, "v"): v}
        held |= {(short.name, "rot_q"): Q, (short.name, "rot_k"): K, (short.name, "v"): V}
        for name, (queries, keys, values), mask in (
            (ragged.name, (q, k, v), seen(real)),
            (short.name, (Q, K, V), seen(None)),
        ):
            keys, values = (x.repeat_interleave(HEADS // KV, 2) for x in (keys, values))
            scores = torch.einsum("bihd,bjhd->bhij", queries, keys) / 4.0
            held[name, "z"] = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)
        return loose(held, probes=SHORT, attention__scale=4.0)

    def no_mask(real):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)

    def not_causal(real):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool) if real is None else real[:, None, None]

    def causal(real):
        size = POS if real is None else length
        return torch.ones(size, size, dtype=torch.bool).tril() & not_causal(real) | torch.eye(size, dtype=torch.bool)

    for wrong, said in ((no_mask, "no mask"), (not_causal, "not causal")):
        findings = explained(side(wrong), side(causal))
        assert findings.keys() == {"attention.mask"}
        assert findings["attention.mask"].candidate_value == said


@pytest.mark.parametrize("more", [1.0, 0.25, 1e-3])
def test_a_number_that_is_added_behind_the_subtraction_of_the_largest_score(more):
    def law(s):
        below = (s - s.masked_fill(~SEEN, -torch.inf).amax(-1, keepdim=True)).exp() * SEEN
        return below / (more + below.sum(-1, keepdim=True))

    said = explained(side(law), side())[KNOB].candidate_value

    assert said.startswith("softmax of scores less the largest, with ")
    assert float(said.split()[7]) == pytest.approx(more, rel=1e-3)
