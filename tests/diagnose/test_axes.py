"""Heads that are cut out of a projection, or joined for one, in the wrong order of axes: planted by hand and named by formula."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from loose import SHORT, explained, loose

from parity_audit.formulas.choices import HEAD_POS, POS_HEAD
from parity_audit.formulas.projections import taken_for

PLAIN, PADDED = SHORT
HEADS, WIDTH = 4, 16
WRONG = "head pos d_head"


def cut_wrong(x):
    batch, pos, head, d_head = x.shape
    return x.reshape(batch, head, pos, d_head).transpose(1, 2)


def joined_wrong(z):
    return z.transpose(1, 2).reshape(z.shape)


def side(parts="", *, joined=False):
    """Attention without rotation on both probes, of which some parts are cut wrongly."""
    held = {}
    for number, one in enumerate((PLAIN, PADDED)):
        draw = torch.Generator().manual_seed(number)
        real = torch.tensor(one.mask).bool()
        made = {name: torch.randn(*real.shape, HEADS, WIDTH, generator=draw) for name in "qkv"}
        q, k, v = (cut_wrong(x) if name in parts else x for name, x in made.items())
        seen = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril() & real[:, None, None]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / WIDTH**0.5
        z = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        sites = {**made, "rot_q": q, "rot_k": k, "z": joined_wrong(z) if joined else z}
        held |= {(one.name, site): x for site, x in sites.items()}
    return loose(held, probes=SHORT, attention__scale=4.0, rope__theta=None)


@pytest.mark.parametrize(
    ("parts", "said"), [("qkv", WRONG), ("qk", f"{WRONG} of queries and keys"), ("q", f"{WRONG} of queries"),
                        ("k", f"{WRONG} of keys"), ("v", f"{WRONG} of values")],
)  # fmt: skip
def test_heads_that_are_cut_out_in_the_wrong_order(parts, said):
    findings = explained(side(parts), side())

    assert {knob: one.candidate_value for knob, one in findings.items()} == {"attention.cut": said}


def test_heads_that_are_joined_in_the_wrong_order():
    """A padded text, where what padding attends to stands in the place of tokens, says nothing of it."""
    findings = explained(side(joined=True), side())

    assert {knob: one.candidate_value for knob, one in findings.items()} == {"attention.joined": WRONG}


def test_heads_in_the_right_order_are_no_finding():
    assert explained(side(), side()) == {}


def test_one_step_of_one_token_has_one_order():

    x = torch.randn(2, 6, HEADS, WIDTH)
    made = taken_for(x, [4, 1, 1], laid=POS_HEAD, read=HEAD_POS)

    assert torch.equal(made[:, 4:], x[:, 4:])
    assert torch.equal(made[:, :4], cut_wrong(x[:, :4]))
    assert torch.equal(taken_for(made, [4, 1, 1], laid=HEAD_POS, read=POS_HEAD), x)
    assert torch.equal(rearrange(taken_for(x, [6], laid=HEAD_POS, read=POS_HEAD), "b p h d -> b (p h d)"),
                       rearrange(x, "b p h d -> b (h p d)"))  # fmt: skip
