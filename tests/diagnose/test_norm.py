"""Norms: eps where the inputs can tell, offset, kind, and silence where they cannot."""

import pytest
import torch
from tiny_port import Port, fits, found

NORM = {"norm", "final_norm"}
SMALL = Port(embed_std=0.02, embed_scale=1.0, eps=1e-5)
LARGE = Port(embed_std=1.0, embed_scale=9.8, eps=1e-6)


@pytest.mark.parametrize("eps", [1e-6, 3e-6, 1e-5, 2.5e-4, 1e-3])
def test_eps_within_a_percent_on_small_inputs(eps: float):
    read = fits(SMALL.but(eps=eps), "norm", norm__eps=1e-5)["norm.eps", 0, "ln1.out"]

    assert read.value == pytest.approx(eps, rel=0.01)
    assert abs(read.value - eps) < 4 * read.stderr


def test_wrong_eps():
    finding = found(SMALL.but(eps=1e-6), SMALL, NORM)["norm.eps"]

    assert finding.candidate_value == pytest.approx(1e-6, rel=0.01)
    assert finding.reference_value == pytest.approx(1e-5, rel=0.01)
    assert (finding.layers, finding.departs_from_spec) == (None, "candidate")


def test_large_inputs_cannot_tell_and_say_so():
    assert not [key for key in fits(LARGE, "norm") if key[0] == "norm.eps"]
    assert found(LARGE.but(eps=1e-5), LARGE, NORM) == {}


@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("port", [SMALL, LARGE], ids=["small", "large"])
def test_offset(port: Port, wrong: float, right: float):
    finding = found(port.but(norm_offset=wrong), port.but(norm_offset=right), NORM)["norm.offset"]

    assert finding.candidate_value == pytest.approx(wrong, abs=1e-4)
    assert finding.reference_value == pytest.approx(right, abs=1e-4)
    assert finding.departs_from_spec == "candidate"


@pytest.mark.parametrize("d_model", [48, 96])
def test_layer_norm_for_rms_norm(d_model: int):
    finding = found(SMALL.but(kind="layer", d_model=d_model), SMALL.but(d_model=d_model), NORM)["norm.kind"]

    assert (finding.reference_value, finding.candidate_value, finding.kind) == ("rms", "layer", "variant")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("port", [SMALL, LARGE], ids=["small", "large"])
def test_clean(port: Port, dtype: torch.dtype):
    for seed in range(4):
        assert found(port.but(dtype=dtype, seed=seed), port.but(dtype=torch.float64, seed=seed), NORM) == {}
