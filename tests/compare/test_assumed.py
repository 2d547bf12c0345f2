"""Sites that no module shows: they explain an error of their block, and accuse nobody."""

import torch

from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import first_divergence, judge_comparison
from parity_audit.core.report import Verdict
from tests.held import Held, probe

PROBE = probe(length=6)
SITES = ("blocks.0.rot_q", "blocks.0.z", "logits")


def sides(*, assumed, query=0.0, z=0.0, **other):
    """A judge, a reference 1e-7 away from it, and a candidate as far, with so much more at the query and at z."""
    draw = torch.Generator().manual_seed(0)
    true = {site: torch.randn(1, 6, 2, 4, generator=draw, dtype=torch.float64) for site in SITES}
    true["logits"] = true["logits"].flatten(2)

    def near(more):
        return {
            site: x + 1e-7 * torch.randn(x.shape, generator=draw, dtype=x.dtype) + more.get(site, 0.0)
            for site, x in true.items()
        }

    candidate = near({"blocks.0.rot_q": query, "blocks.0.z": z}) | other
    return Held(PROBE, candidate, assumed), Held(PROBE, near({})), Held(PROBE, true)


def compared(**given):
    return compare(*sides(**given), dtype="float32")


def test_a_departing_query_that_is_an_assumption_is_not_comparable():
    found = compared(assumed=("blocks.0.rot_q",), query=1.0)

    assert judge_comparison(found)[0] is Verdict.PARITY
    assert [item.site for item in found.not_comparable] == ["blocks.0.rot_q"]
    assert "not comparable" in found.not_comparable[0].why
    assert "a local of its code" in found.not_comparable[0].why
    assert first_divergence(found) is None
    assert {delta.site for delta in found.sites} == {"blocks.0.z", "logits"}


def test_the_same_query_at_a_hook_of_the_port_is_a_mismatch():
    found = compared(assumed=(), query=1.0)

    assert judge_comparison(found)[0] is Verdict.MISMATCH
    assert found.not_comparable == ()


def test_where_the_block_departs_the_assumed_query_may_be_why():
    found = compared(assumed=("blocks.0.rot_q",), query=1.0, z=0.1)

    assert judge_comparison(found)[0] is Verdict.MISMATCH
    assert "blocks.0.z" in judge_comparison(found)[1]
    assert first_divergence(found).site == "blocks.0.rot_q"
    assert found.not_comparable == ()


def test_other_axes_and_nan_of_an_assumed_tensor_are_set_aside():
    for wrong in (torch.zeros(2, 1, 6, 2, 4), torch.zeros(1, 3, 2, 4), torch.full((1, 6, 2, 4), torch.nan)):
        found = compared(assumed=("blocks.0.rot_q",), **{"blocks.0.rot_q": wrong})

        assert judge_comparison(found)[0] is Verdict.PARITY
        assert [item.site for item in found.not_comparable] == ["blocks.0.rot_q"]


def test_an_assumed_mask_accuses_only_with_its_block():
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hidden = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    for z, verdict in ((0.0, Verdict.PARITY), (0.1, Verdict.MISMATCH)):
        held = sides(assumed=("blocks.0.attn_scores",), z=z)
        for side, value in zip(held, (scores, hidden, hidden), strict=True):
            side.tensors["blocks.0.attn_scores"] = value
        found = compare(*held, dtype="float32")

        assert judge_comparison(found)[0] is verdict
        assert bool(found.mask_mismatch) is (verdict is Verdict.MISMATCH)
