"""A wrong hook shows the nearest site. Scores that softmax cannot tell apart are the same; those one percent off are not."""

import torch

from parity_audit.checks.by_name import from_own_key, nearest, rounding
from parity_audit.checks.reading import Values
from parity_audit.core.types import Probe

PROBE = Probe(name="short", purpose="test", token_ids=((5, 6, 7, 8),), mask=((1, 1, 1, 1),))


def test_a_constant_per_query_is_dropped_and_nothing_else():
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    masked = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    shifted = masked + torch.randn(1, 2, 4, 1, dtype=torch.float64)
    first, second, scaled = (
        from_own_key(Values(PROBE, {"x": lambda value=value: value})).tensor("x")
        for value in (masked, shifted, 1.01 * masked)
    )

    assert torch.equal(first.isinf(), second.isinf())
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first.softmax(-1), masked.softmax(-1))
    assert (first - scaled).nan_to_num(0.0).abs().max() > 1e-3


def test_a_norms_output_is_not_taken_for_a_multiple_of_its_input_in_bfloat16():
    torch.manual_seed(0)
    stream = torch.randn(400, 64, dtype=torch.float64)
    weight = 1.0 + 0.3 * torch.randn(64, dtype=torch.float64)
    out = stream / stream.square().mean(-1, keepdim=True).sqrt() * weight
    sites = [("blocks.0.resid_pre", stream.flatten()), ("blocks.0.ln1.out", out.to(torch.bfloat16).double().flatten())]

    for dtype in ("bfloat16", "float16"):
        assert nearest(out.flatten(), sites, within=rounding(dtype)) == "ln1.out"
        assert nearest(out.flatten(), sites[:1], within=rounding(dtype)) == ""
    assert nearest(3.0 * sites[1][1], sites, within=rounding("float32")) == "3 times ln1.out"
    assert nearest(out.flatten(), sites, within=rounding("float32")) == ""
