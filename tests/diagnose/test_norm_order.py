"""Where a norm stands: each place planted with torch's own module and read back, the usual one never accused."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, explained, loose

D = 64
X, A, M = (
    torch.randn(3, 1, 48, D, generator=torch.Generator().manual_seed(4))
    * torch.tensor([1.0, 0.3, 0.4])[:, None, None, None]
)
GAIN, BIAS = 1 + 0.2 * torch.randn(2, D, generator=torch.Generator().manual_seed(5))
ROLES = ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post")
USUAL = {"ln1.out": X, "ln1_post.out": A, "ln2.out": X + A, "ln2_post.out": M}


def normed(x, kind):
    if kind == "rms":
        return torch.nn.functional.rms_norm(x, (D,), GAIN, 1e-6)
    return torch.nn.functional.layer_norm(x, (D,), GAIN, BIAS, 1e-6)


def block(kind="rms", **read):
    sites = {"resid_pre": X, "attn_proj": A, "resid_mid": X + A, "mlp_proj": M}
    reads = {**USUAL, **{name.replace("_out", ".out"): x for name, x in read.items()}}
    weights = dict.fromkeys(ROLES, GAIN) | (
        dict.fromkeys([f"{role}.bias" for role in ROLES], BIAS) if kind == "layer" else {}
    )
    return loose({**sites, **{name: normed(x, kind) for name, x in reads.items()}}, weights=weights, probes=SHORT[:1],
                 norm__kind=kind, norm__eps=1e-6)  # fmt: skip


PLACES = [
    ("ln1_out", A, "on what attention made"), ("ln2_out", M, "on what the MLP made"),
    ("ln1_post_out", X, "before attention"), ("ln2_post_out", X + A, "before the MLP"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("site", "read", "says"), PLACES)
def test_a_norm_that_stands_elsewhere(site, read, says, kind):
    findings = explained(block(kind, **{site: read}), block(kind))

    assert (findings["norm.order"].candidate_value, findings["norm.order"].reference_value) == (says, "in its place")
    assert not {knob for knob in findings if knob.startswith("norm.")} - {"norm.order"}


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_block_that_normalises_sums(kind):
    first = normed(X + A, kind)
    findings = explained(
        block(kind, ln1_out=X + A, ln2_out=first + M, ln1_post_out=X + A, ln2_post_out=X + A + M), block(kind)
    )

    assert findings.keys() == {"norm.order"}
    assert findings["norm.order"].candidate_value == "after the sum (post-norm)"


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_in_their_places(kind):
    assert explained(block(kind), block(kind)) == {}


def test_the_norm_of_something_else_is_not_said_to_stand_anywhere():
    other = torch.randn(X.shape, generator=torch.Generator().manual_seed(9))
    assert "norm.order" not in explained(block(ln1_out=other), block())
