"""Window lengths: exact, off by one, absent, in the wrong layers; from scores, from z, and beyond the scores."""

import pytest
from tiny_port import PROBES, Port, found, probe

CORE = {"scores", "pattern", "z"}
HIDDEN = ("attn_scores", "pattern")
SIGHTS = [pytest.param((), id="visible"), pytest.param(HIDDEN, id="hidden")]
PORT = Port(cap=50.0, score_std=6.0)
LONG = (*PROBES, probe("long", (333,), sites="residual", seed=8))


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize("window", [2, 3, 11, 29])
def test_length_within_short_probes(hide: tuple[str, ...], window: int):
    findings = found(PORT.but(window=(window, None), hide=hide), PORT, CORE)

    assert findings.keys() == {"attention.window"}
    assert (findings["attention.window"].candidate_value, findings["attention.window"].layers) == (window, (0,))


@pytest.mark.parametrize("hide", SIGHTS)
@pytest.mark.parametrize("wrong", [19, 21, None])
def test_off_by_one_or_missing(hide: tuple[str, ...], wrong: int | None):
    finding = found(PORT.but(window=(wrong, None), hide=hide), PORT.but(window=(20, None)), CORE)["attention.window"]

    assert (finding.reference_value, finding.candidate_value, finding.layers) == (20, wrong, (0,))
    assert (finding.kind, finding.departs_from_spec) == ("mask", "candidate")


@pytest.mark.parametrize("wrong", [(299, None), (301, None), (None, None), (150, None), (300, 300)])
def test_length_beyond_every_visible_score(wrong: tuple[int | None, int | None]):
    findings = found(PORT.but(window=wrong), PORT.but(window=(300, None)), CORE, probes=LONG)

    assert findings.keys() == {"attention.window"}
    layer = 0 if wrong[0] != 300 else 1
    assert findings["attention.window"].layers == (layer,)
    assert findings["attention.window"].candidate_value == wrong[layer]


def test_inverted_layer_pattern_is_one_finding():
    finding = found(PORT.but(window=(None, 300)), PORT.but(window=(300, None)), CORE, probes=LONG)["attention.window"]

    assert finding.candidate_value == {"by_layer": {"0": None, "1": 300}}
    assert finding.layers is None


def test_together_with_scale_and_cap():
    candidate = PORT.but(window=(299, None), scale=14.9666, cap=30.0, hide=HIDDEN)

    findings = found(candidate, PORT.but(window=(300, None)), CORE, probes=LONG)

    assert findings["attention.window"].candidate_value == 299
    assert findings["attention.scale"].candidate_value == pytest.approx(14.9666, rel=2e-5)
    assert findings["attention.softcap"].candidate_value == pytest.approx(30, rel=1e-4)


@pytest.mark.parametrize("window", [None, (300, None), (12, None)])
def test_clean(window: object):
    assert found(PORT.but(window=window, hide=HIDDEN), PORT.but(window=window), CORE, probes=LONG) == {}


def test_a_window_longer_than_every_probe_is_not_called_missing():
    assert found(PORT, PORT.but(window=(4096, None)), CORE) == {}
