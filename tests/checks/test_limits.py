"""Detection limits from responses and floors: arithmetic on numbers that were chosen by hand."""

import math

import pytest

from parity_audit.checks.limits import Found, Sensitivity, chosen_probe, detection_limits
from parity_audit.checks.responses import PerturbableConstant, Response, perturbable_constants, smallest
from parity_audit.compare.deltas import Comparison
from parity_audit.core.limits import INNER_RATIO, PARITY_RATIO
from parity_audit.core.report import SiteDelta
from parity_audit.core.types import NotTested, Probe
from parity_audit.specs.schema import ResolvedKnob

SCALE = PerturbableConstant(name="attention.scale", knob="attention.scale", value=16.0, whole=16.0)
FLOORS = {"blocks.0.attn_scores": 1e-6, "blocks.0.resid_mid": 1e-7, "logits": 1e-6}


def response(**by_site):
    return Response(moved=SCALE, amount=0.016, by_site={name.replace("__", "."): v for name, v in by_site.items()})


def shown(*sites, probe="short"):
    deltas = tuple(
        SiteDelta(site=site, layer=None, probe=probe, max_abs=0, rmse=0, rel=0, noise_ratio=0.0) for site in sites
    )
    return Comparison(sites=deltas, by_probe=deltas, logits=None)


def test_the_limit_is_where_the_response_reaches_the_limit_of_the_most_sensitive_site():
    """Scores move by 1e-2 and may err by 16e-6; the stream moves by 1e-3 and may err by 4e-7: 4e-4 of 0.016."""
    found = response(blocks__0__attn_scores=1e-2, blocks__0__resid_mid=1e-3, logits=1e-4)

    assert smallest(found, FLOORS) == (pytest.approx(0.016 * PARITY_RATIO * 1e-7 / 1e-3), "blocks.0.resid_mid")
    assert smallest(response(blocks__0__attn_scores=1e-2), FLOORS)[0] == pytest.approx(0.016 * INNER_RATIO * 1e-4)


def test_a_candidate_that_shows_less_sees_less():
    found = Sensitivity(
        probe="short", floors=FLOORS, responses=(Found(everywhere=response(blocks__0__resid_mid=1e-3, logits=1e-4)),),
    )  # fmt: skip
    everything, _ = detection_limits(found, shown("blocks.0.resid_mid", "logits"))
    logits_only, _ = detection_limits(found, shown("logits"))

    assert logits_only[0].limit == pytest.approx(100 * everything[0].limit)
    assert logits_only[0].relative == pytest.approx(logits_only[0].limit / 16)
    assert (everything[0].site, logits_only[0].site) == ("blocks.0.resid_mid", "logits")


@pytest.mark.parametrize("comparison", [shown("embed"), shown("blocks.0.resid_mid", probe="long")])
def test_without_a_site_that_moves_there_is_no_number(comparison):
    known = NotTested(what="detection limit of attention.window", why="not excited")
    found = Sensitivity(
        probe="short", floors=FLOORS, responses=(Found(everywhere=response(blocks__0__resid_mid=1e-3)),), gaps=(known,)
    )
    limits, gaps = detection_limits(found, comparison)

    assert limits == ()
    assert [gap.what for gap in gaps] == ["detection limit of attention.window", "detection limit of attention.scale"]


def test_nothing_that_moves_is_infinitely_far():
    assert smallest(response(), FLOORS) == (math.inf, "")


def test_numbers_can_be_moved_and_words_and_maps_cannot():
    knobs = {
        "attention.scale": ResolvedKnob(value=16.0), "attention.softcap": ResolvedKnob(value=None),
        "mlp.activation": ResolvedKnob(value="silu", kind="variant"), "n_kv_heads": ResolvedKnob(value=2, kind="map"),
        "rope.scaling": ResolvedKnob(value={"rope_type": "llama3", "factor": 32.0}, kind="variant"),
        "attention.window": ResolvedKnob(value=4096, layers=(0, 2)), "flag": ResolvedKnob(value=True),
    }  # fmt: skip
    found = {item.name: item for item in perturbable_constants(knobs)}

    assert found.keys() == {"attention.scale", "rope.scaling.factor", "attention.window"}
    assert found["rope.scaling.factor"].given(33.0) == {"rope_type": "llama3", "factor": 33.0}
    assert found["attention.scale"].given(16.5) == 16.5


def test_the_probe_is_the_longest_of_the_cheap_ones():
    def probe(name, batch, length, sites="all"):
        ids = tuple((1,) * length for _ in range(batch))
        return Probe(name=name, purpose="", token_ids=ids, mask=ids, sites=sites)

    cheap = [probe("repeated", 1, 32), probe("short", 1, 48), probe("ragged", 3, 40)]
    long = [probe("long", 1, 4160, "residual"), probe("longer", 1, 9000, "residual")]

    assert chosen_probe([*long, *cheap]).name == "short"
    assert chosen_probe(long).name == "long"


def test_a_count_is_off_by_one_or_not_at_all():
    heads = PerturbableConstant(name="moe.top_k", knob="moe.top_k", value=2.0, whole=2)
    seen = Response(moved=heads, amount=heads.amount(0.002), by_site={"logits": 1.0})
    blunt = Response(moved=heads, amount=heads.amount(3.2), by_site={"logits": 3e-6})
    found = Sensitivity(probe="short", floors=FLOORS, responses=(Found(everywhere=seen), Found(everywhere=blunt)))
    limits, _ = detection_limits(found, shown("logits"))

    assert (seen.amount, blunt.amount) == (1.0, 3.0)
    assert [item.limit for item in limits] == [1, 4]


def in_layers(alone, *sites):
    found = Sensitivity(
        probe="short", floors=FLOORS, responses=(Found(everywhere=response(blocks__0__resid_mid=1e-3), alone=alone),)
    )  # fmt: skip
    return detection_limits(found, shown(*sites))[0][0].one_layer


def test_the_layer_that_counts_is_the_one_where_an_error_shows_least():
    """Layer 0 shows 0.016 by 1e-3 where 4e-7 is rounding, layer 1 by 1e-5 where 4e-6 is: its limit is 0.4 of 0.016."""
    alone = {0: response(blocks__0__resid_mid=1e-3), 1: response(logits=1e-5)}
    found = in_layers(alone, "blocks.0.resid_mid", "logits")

    assert (found.layer, found.site) == (1, "logits")
    assert found.limit == pytest.approx(0.016 * PARITY_RATIO * 1e-6 / 1e-5)
    assert found.relative == pytest.approx(found.limit / 16)


def test_a_layer_that_never_shows_an_error_has_no_limit_and_counts_before_all_others():
    alone = {0: response(), 1: response(logits=1e-9)}
    found = in_layers(alone, "blocks.0.resid_mid", "logits")

    assert (found.layer, found.limit, found.relative, found.site) == (0, None, None, "")


def test_a_candidate_that_does_not_show_a_layer_does_not_see_it():
    alone = {0: response(blocks__0__resid_mid=1e-3), 1: response(logits=1e-5)}

    assert in_layers(alone, "blocks.0.resid_mid").layer == 1
    assert in_layers(alone, "blocks.0.resid_mid").limit is None


def test_constants_outside_the_blocks_have_no_layer():
    assert in_layers({}, "blocks.0.resid_mid") is None
