"""Queries and keys that differ and make the same scores: rotations by known angles, in closed form."""

import dataclasses

import pytest
import torch

from parity_audit.compare.cancelling import SAME_FUNCTION, cancelling_cause
from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Verdict
from tests.held import Held, probe

LENGTH, D_HEAD = 24, 16
PROBE = probe(batch=2, length=LENGTH)
PADDED = dataclasses.replace(PROBE, mask=((0,) * 8 + (1,) * (LENGTH - 8), (1,) * LENGTH))
Q, K = "blocks.0.rot_q", "blocks.0.rot_k"


def rotated(x, positions, pairing, d_rot):
    """RoFormer's rotation of the first `d_rot` components of x `[b p head d_head]`."""
    frequencies = 10000.0 ** (-torch.arange(0, d_rot, 2, dtype=torch.float64) / d_rot)
    angle = (positions[..., None].double() * frequencies)[:, :, None]
    turning, rest = x[..., :d_rot], x[..., d_rot:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if pairing == "adjacent" else turning.chunk(2, dim=-1)
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    out = torch.stack([a, b], -1).flatten(-2) if pairing == "adjacent" else torch.cat([a, b], -1)
    return torch.cat([out, rest], -1)


def side(*, q_shift=0, k_shift=None, pairing="half", d_rot=D_HEAD, q_times=1.0, k_times=1.0, assumed=(), noise=0):
    draw = torch.Generator().manual_seed(3)
    q, k, logits = (torch.randn(2, LENGTH, heads, D_HEAD, generator=draw, dtype=torch.float64) for heads in (4, 2, 1))
    places = torch.arange(LENGTH).expand(2, -1)
    shift = torch.tensor(q_shift)[..., None]
    other = shift if k_shift is None else torch.tensor(k_shift)[..., None]
    held = {
        "blocks.0.q": q, "blocks.0.k": k, "logits": logits[:, :, 0],
        Q: rotated(q, places + shift, pairing, d_rot) * q_times, K: rotated(k, places + other, pairing, d_rot) * k_times,
    }  # fmt: skip
    draw = torch.Generator().manual_seed(noise)
    return Held(
        PROBE, {name: x + 1e-7 * noise * torch.randn(x.shape, generator=draw) for name, x in held.items()}, assumed
    )


@pytest.mark.parametrize(("pairing", "d_rot"), [("half", D_HEAD), ("half", 8), ("adjacent", D_HEAD)])
def test_a_shift_of_queries_and_keys_is_counted(pairing, d_rot):
    kind = {"pairing": pairing, "d_rot": d_rot}
    said = cancelling_cause(side(q_shift=1, **kind), side(**kind), PROBE, 0)

    assert said == f"{SAME_FUNCTION}: positions are shifted by +1 in queries and keys alike"


def test_what_stands_in_padded_places_does_not_count():
    """A reference computes something there; an engine that runs requests side by side has nothing."""
    ours, theirs = side(q_shift=1), side()
    mask = torch.tensor(PADDED.mask, dtype=torch.bool)
    for name in (Q, K):
        ours.tensors[name] = ours.tensors[name] * mask[..., None, None]
    said = cancelling_cause(ours, theirs, PADDED, 0)

    assert said.startswith(SAME_FUNCTION)
    assert said.endswith("positions are shifted by +1 in queries and keys alike")


def test_rows_may_start_at_their_own_positions():
    said = cancelling_cause(side(q_shift=[0, 3]), side(), PROBE, 0)

    assert said.startswith(f"{SAME_FUNCTION}: positions of each row are shifted by a constant of its own (+0, +3)")


def test_a_shift_beyond_a_whole_turn_is_not_miscounted():
    said = cancelling_cause(side(q_shift=1000), side(), PROBE, 0)

    assert said == f"{SAME_FUNCTION}: positions are shifted by a constant in queries and keys alike"


def test_a_factor_on_queries_is_said():
    assert "queries are multiplied by 0.125 before" in cancelling_cause(side(q_times=0.125), side(), PROBE, 0)
    both = cancelling_cause(side(q_shift=1, q_times=0.125), side(), PROBE, 0)
    assert "shifted by +1" in both
    assert "queries are multiplied by 0.125" in both


@pytest.mark.parametrize("wrong", [{"q_shift": 1, "k_shift": 0}, {"pairing": "adjacent"}, {"q_shift": 1, "k_shift": 2}])
def test_what_does_not_cancel_is_not_excused(wrong):
    assert cancelling_cause(side(**wrong), side(), PROBE, 0) == ""


@pytest.mark.parametrize("assumed", [(), (Q, K)])
def test_shifted_positions_are_parity_at_a_hook_too(assumed):
    found = compare(side(q_shift=1, assumed=assumed, noise=1), side(noise=2), side(), dtype="float32")

    assert judge_comparison(found)[0] is Verdict.PARITY
    assert [item.site for item in found.not_comparable] == [Q, K]
    assert all(SAME_FUNCTION in item.why for item in found.not_comparable)


def test_another_rotation_at_a_hook_is_a_mismatch():
    wrong = side(q_shift=1, k_shift=0, noise=1)

    assert judge_comparison(compare(wrong, side(noise=2), side(), dtype="float32"))[0] is Verdict.MISMATCH
