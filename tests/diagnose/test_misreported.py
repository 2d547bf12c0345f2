"""A hook that lies is told from a component that errs: what is added decides, not what is shown."""

import pytest
import torch
from held import Held, probe

from parity_audit.diagnose.misreported import misreported, without


def block(layer, seed=0):
    draw = torch.Generator().manual_seed(seed)
    pre, attn, mlp = (torch.randn(2, 5, 64, generator=draw) for _ in range(3))
    sites = {
        "resid_pre": pre,
        "attn_out": attn,
        "resid_mid": pre + attn,
        "mlp_out": mlp,
        "resid_post": pre + attn + mlp,
    }
    return {f"blocks.{layer}.{name}": value for name, value in sites.items()}


def found(own, replay, *wrong):
    short = probe(batch=2, length=5)
    ratios = {(short.name, site): 1e4 for site in wrong}
    held = [Held(short, sites) for sites in (own, replay)]
    return misreported(*held, ratios, "float32"), ratios


@pytest.mark.parametrize(("term", "total"), [("attn_out", "resid_mid"), ("mlp_out", "resid_post")])
def test_a_hook_that_shows_a_multiple_is_named_and_the_sum_is_not_accused(term, total):
    replay = block(1)
    own = {**replay, f"blocks.1.{term}": 0.22 * replay[f"blocks.1.{term}"]}
    (finding,), ratios = found(own, replay, f"blocks.1.{term}", f"blocks.1.{total}")

    assert (finding.knob, finding.kind, finding.layers) == (term, "hook", (1,))
    assert without(ratios, (finding,)) == {}


def test_a_component_that_errs_is_no_hook():
    replay = block(1)
    own = dict(replay)
    for name in ("attn_out", "resid_mid", "resid_post"):
        own[f"blocks.1.{name}"] = own[f"blocks.1.{name}"] + 0.01
    findings, _ = found(own, replay, "blocks.1.attn_out")

    assert findings == ()


def test_rounding_of_the_sum_is_allowed_and_ten_times_as_much_is_not():
    replay = block(1)
    lie = {**replay, "blocks.1.attn_out": torch.zeros(2, 5, 64)}
    eps = torch.finfo(torch.float32).eps
    for times, count in ((1.0, 1), (50.0, 0)):
        sum_ = replay["blocks.1.resid_mid"] * (1 + times * eps)
        assert len(found({**lie, "blocks.1.resid_mid": sum_}, replay, "blocks.1.attn_out")[0]) == count
