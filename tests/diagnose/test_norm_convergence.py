"""A norm's fit on weights as training makes them: a few channels outweigh all others, in some tokens these, in others those."""

import pytest
import torch

from parity_audit.core.types import NotTested
from parity_audit.diagnose.evidence import relative_rms
from parity_audit.diagnose.identify.norm import shape
from parity_audit.diagnose.identify.norm.family import fit_norm
from parity_audit.diagnose.identify.norm.shape import Norm, best_shape, shape_of
from parity_audit.formulas.norms import centred

EPS, ROUNDING = 1e-5, 6e-8


def outlying(kind: str, *, with_bias: bool, rounding: float = ROUNDING) -> tuple[Norm, torch.Tensor]:
    """A norm whose tokens fall into two groups, each with an outlier channel of its own; and its weight."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    x = normal(160, 1, 64) * 0.02
    x[:80, :, 3] *= 1000
    x[80:, :, 7] *= 1000
    middle = centred(x, kind)
    w, b = 1 + 0.5 * normal(1, 64), normal(1, 64) * 0.3
    out = middle * (middle.square().mean(-1, keepdim=True) + EPS).rsqrt() * w + (b if with_bias else 0.0)
    return Norm(prefix="norm", site="ln1.out", x=x, out=out * (1 + rounding * normal(*x.shape)), w=w, b=None), w


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_weight_is_found_up_to_one_factor(kind, with_bias):
    norm, w = outlying(kind, with_bias=with_bias)
    found = shape_of(norm, kind, with_bias=with_bias)

    assert found.settled
    assert found.left < 2 * ROUNDING
    factor = (found.weight * w).sum() / w.square().sum()
    assert relative_rms(found.weight - factor * w, w) < 1e-4
    chosen, told = best_shape(norm)
    assert (chosen.kind, chosen.bias is not None, told) == (kind, with_bias, True)


def test_a_search_that_has_not_converged_claims_nothing(monkeypatch):
    monkeypatch.setattr(shape, "ROUNDS", 1)
    norm, _ = outlying("rms", with_bias=False)
    found, told = best_shape(norm)

    assert not found.settled
    assert not told

    class Bare:
        side, layer = "candidate", 0

    outcomes = fit_norm(Bare(), norm, {}, (found, told))
    assert all(isinstance(item, NotTested) for item in outcomes)
    assert "has not converged: nothing is claimed" in outcomes[0].why
