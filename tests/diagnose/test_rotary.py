"""Rotary constants off rotated vectors: theta, scaling, pairing, partial dims, where positions start."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_port import PROBES, Port, departing, found, probe
from torch import Tensor

ROPE = {"rope"}
LONG = (*PROBES, probe("long", (2500,), sites="residual", seed=9))


def llama3(factor: float, low: float = 1.0, high: float = 4.0, original: float = 8192.0) -> Callable[[Tensor], Tensor]:
    """Transcribed from the Llama 3.1 release, in terms of wavelengths."""

    def scale(inv_freq: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inv_freq
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
        slow = torch.where(wavelength > original / low, inv_freq / factor, between)
        return torch.where(wavelength < original / high, inv_freq, slow)

    return scale


def spec(factor: float) -> dict[str, object]:
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip


PORT = Port(theta=500000.0, d_head=64)
SCALED = PORT.but(scaling=llama3(32.0))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(theta=st.floats(500, 5e6), d_head=st.sampled_from([16, 24, 64]), pairing=st.sampled_from(["half", "adjacent"]))
def test_theta_to_a_thousandth(theta: float, d_head: int, pairing: str):
    read = departing(PORT.but(theta=theta, d_head=d_head, pairing=pairing), rope__theta=77.0)

    assert read.keys() == {("rope.theta", layer) for layer in (0, 1)}
    assert read["rope.theta", 0].value == pytest.approx(theta, rel=1e-3)


@pytest.mark.parametrize("probes", [PROBES, LONG], ids=["short", "long"])
def test_theta_and_scaling_both_missing(probes: tuple):
    findings = found(PORT.but(theta=10000.0), SCALED, ROPE, probes=probes, rope__scaling=spec(32.0))

    assert findings.keys() == {"rope.theta", "rope.scaling"}
    assert findings["rope.theta"].candidate_value == pytest.approx(10000, rel=1e-5)
    assert findings["rope.theta"].reference_value == pytest.approx(500000, rel=1e-5)
    assert findings["rope.scaling"].candidate_value is None
    assert findings["rope.scaling"].reference_value == spec(32.0)
    assert {finding.departs_from_spec for finding in findings.values()} == {"candidate"}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(factor=st.floats(2, 60))
def test_another_factor(factor: float):
    read = departing(PORT.but(scaling=llama3(factor)), rope__scaling=spec(77.0))["rope.scaling", 0]

    assert read.value["rope_type"] == "llama3"
    assert read.value["factor"] == pytest.approx(factor, rel=1e-3)


def test_other_thresholds():
    port = PORT.but(scaling=llama3(8.0, low=0.7, high=6.0), d_head=128)

    scaling = departing(port, probes=LONG, rope__scaling=spec(8.0))["rope.scaling", 0].value

    assert scaling["factor"] == pytest.approx(8, rel=1e-3)
    assert scaling["low_freq_factor"] == pytest.approx(0.7, rel=0.02)
    assert scaling["high_freq_factor"] == pytest.approx(6, rel=0.02)


@pytest.mark.parametrize("factor", [2.0, 3.7])
def test_linear_scaling(factor: float):
    findings = found(PORT.but(scaling=lambda f: f / factor), PORT, ROPE)

    assert findings.keys() == {"rope.scaling"}
    expected = {"rope_type": "linear", "factor": pytest.approx(factor, rel=1e-5)}
    assert findings["rope.scaling"].candidate_value == expected


def test_a_table_without_a_formula_is_shown_as_it_is():
    bent = PORT.but(scaling=lambda f: f * (1 + 0.05 * torch.sin(5 * torch.arange(len(f)))))

    value = found(bent, PORT, ROPE)["rope.scaling"].candidate_value

    assert value["rope_type"] == "table"
    assert value["inv_freq"][1] == pytest.approx(500000 ** (-2 / 64) * (1 + 0.05 * math.sin(5)), rel=1e-5)


def test_pairing():
    findings = found(PORT.but(pairing="adjacent"), PORT, ROPE)

    assert findings.keys() == {"rope.pairing"}
    assert (findings["rope.pairing"].reference_value, findings["rope.pairing"].candidate_value) == ("half", "adjacent")


@pytest.mark.parametrize("d_rot", [16, 32, 48])
def test_partial_rotary(d_rot: int):
    findings = found(PORT.but(d_rot=d_rot), PORT, ROPE)

    assert findings.keys() == {"rope.partial"}
    assert (findings["rope.partial"].reference_value, findings["rope.partial"].candidate_value) == (None, d_rot)


@pytest.mark.parametrize(
    ("change", "said"), [({"offset_positions": 1}, 1.0), ({"count_padding": True}, "counted from the padding")]
)
def test_where_positions_start(change: dict[str, object], said: object):
    findings = found(PORT.but(**change), PORT, ROPE)

    assert findings.keys() == {"rope.offset"}
    assert findings["rope.offset"].candidate_value == said
    assert findings["rope.offset"].kind == "settings"


def test_one_layer_and_a_thousandth():
    finding = found(PORT.but(theta=(500000.0, 500500.0)), PORT, ROPE)["rope.theta"]

    assert finding.layers == (1,)
    assert finding.candidate_value == pytest.approx(500500, rel=1e-5)
    assert finding.departs_from_spec == "candidate"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("port", [PORT, SCALED], ids=["plain", "scaled"])
def test_clean(port: Port, dtype: torch.dtype):
    scaling = spec(32.0) if port is SCALED else None

    assert found(port.but(dtype=dtype), port.but(dtype=torch.float64), ROPE, probes=LONG, rope__scaling=scaling) == {}


def test_a_layer_without_rotation_is_seen():
    port = PORT.but(scaling=lambda f: f * 0)

    assert departing(port)["rope.theta", 0].value is None
