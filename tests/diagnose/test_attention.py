"""Scale and soft-cap off real attention, with the scores in sight and without."""

import pytest
import torch
from tiny_port import Port, departing, found

from parity_audit.diagnose.evidence import PICTURE_POINTS
from parity_audit.report.evidence import evidence_lines

CORE = {"scores", "pattern", "z"}
HIDDEN = ("attn_scores", "pattern")
SIGHTS = [pytest.param((), id="visible"), pytest.param(HIDDEN, id="hidden")]
PORT = Port(cap=50.0, score_std=15.0)


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize(
    ("scale", "cap", "sizes"),
    [
        (13.37, 50.0, {}),
        (14.9666, 30.0, {"n_heads": 6, "n_kv_heads": 3}),
        (7.25, 20.0, {"d_head": 16, "seed": 5}),
        (16.0, None, {"n_heads": 3, "n_kv_heads": 1, "d_model": 80}),
        (21.0, 41.3, {"n_heads": 2, "n_kv_heads": 2, "d_head": 64}),
    ],
)
def test_both_constants_to_four_digits(hide: tuple[str, ...], scale: float, cap: float | None, sizes: dict[str, int]):
    read = departing(PORT.but(scale=scale, cap=cap, hide=hide, **sizes), attention__softcap=50.0, attention__scale=16.0)
    wrong = {"attention.scale": scale != 16.0, "attention.softcap": cap != 50.0}

    assert {knob for knob, _ in read} == {knob for knob, is_wrong in wrong.items() if is_wrong}
    for (knob, _), fit in read.items():
        expected = scale if knob == "attention.scale" else cap
        assert fit.value == (expected and pytest.approx(expected, rel=2e-4 if knob == "attention.softcap" else 2e-5))


@pytest.mark.parametrize("hide", SIGHTS)
def test_both_wrong_at_once(hide: tuple[str, ...]):
    findings = found(PORT.but(scale=14.9666, cap=None, hide=hide), PORT, CORE)

    assert findings.keys() == {"attention.scale", "attention.softcap"}
    assert findings["attention.scale"].candidate_value == pytest.approx(14.9666, rel=2e-5)
    assert findings["attention.scale"].reference_value == pytest.approx(16, rel=2e-5)
    assert findings["attention.softcap"].candidate_value is None
    assert findings["attention.softcap"].reference_value == pytest.approx(50, rel=1e-4)
    assert {finding.departs_from_spec for finding in findings.values()} == {"candidate"}


@pytest.mark.parametrize("hide", SIGHTS)
def test_wrong_in_some_layers_only(hide: tuple[str, ...]):
    reference = PORT.but(n_layers=4)
    candidate = reference.but(scale=(16.0, 15.2, 16.0, 15.2), cap=(50.0, 50.0, 37.0, 50.0), hide=hide)

    findings = found(candidate, reference, CORE)

    assert findings["attention.scale"].layers == (1, 3)
    assert findings["attention.scale"].candidate_value == pytest.approx(15.2, rel=2e-5)
    assert findings["attention.softcap"].layers == (2,)
    assert findings["attention.softcap"].candidate_value == pytest.approx(37, rel=1e-4)


def test_a_reference_without_the_cap_departs_from_the_spec():
    findings = found(PORT.but(scale=14.9666), PORT.but(cap=None, hide=HIDDEN), CORE, attention__softcap=50.0)

    assert findings["attention.softcap"].departs_from_spec == "reference"
    assert findings["attention.softcap"].reference_value is None
    assert findings["attention.scale"].departs_from_spec == "candidate"


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_sides_give_no_finding(hide: tuple[str, ...], cap: float | None, dtype: torch.dtype):
    for seed in range(3):
        reference = PORT.but(cap=cap, seed=seed, dtype=torch.float64)
        assert found(reference.but(dtype=dtype, hide=hide), reference, CORE) == {}


@pytest.mark.parametrize("hide", SIGHTS)
def test_a_thousandth_is_found_in_float32(hide: tuple[str, ...]):
    findings = found(PORT.but(scale=16.016, hide=hide), PORT.but(dtype=torch.float64), CORE)

    assert findings.keys() == {"attention.scale"}
    assert findings["attention.scale"].candidate_value == pytest.approx(16.016, rel=2e-5)


def test_a_finding_keeps_some_scores_with_the_curve_that_was_fitted_to_them():
    finding = found(PORT.but(scale=14.9666, cap=50.0), PORT.but(cap=50.0), CORE)["attention.scale"]
    first, *rest = finding.evidence["candidate"]
    dots = torch.tensor(first["points"], dtype=torch.float64)
    curve = 50.0 * torch.tanh(dots[:, 0] / 14.9666 / 50.0)

    assert len(dots) <= PICTURE_POINTS
    assert bool((dots[:, 0].diff() >= 0).all())
    torch.testing.assert_close(dots[:, 2], curve, rtol=3e-4, atol=1e-3)
    torch.testing.assert_close(dots[:, 1], dots[:, 2], rtol=3e-4, atol=1e-3)
    assert all("points" not in entry for entry in rest)
    assert "points" not in " ".join(evidence_lines(finding.evidence))
