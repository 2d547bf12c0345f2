"""Causes by formula alone, on ports whose one wrong constant is known; the families of fits take no part."""

import dataclasses
import math

import pytest
import torch
from tiny_port import PROBES, Port, evidence, found, spec_of

from parity_audit.diagnose.evidence import PICTURE_POINTS
from parity_audit.diagnose.findings import places_of
from parity_audit.diagnose.fit.causes import causes
from parity_audit.diagnose.fit.explain import explanations
from parity_audit.diagnose.fit.search import fitted
from parity_audit.diagnose.fit.sides import side_of, sites_with_formula
from parity_audit.diagnose.fit.site_residual import residual
from parity_audit.diagnose.fitting import causes_at, identify_by_formula
from parity_audit.diagnose.thresholds import MANY_ROUNDINGS
from parity_audit.formulas.caps import capped
from parity_audit.formulas.knobs import KNOBS

PORT = Port()
HIDDEN = ("attn_scores", "pattern")


def eightfold(inv_freq):
    return inv_freq / 8.0


FAULTS = {
    "attention.scale": ({"scale": 12.3}, 12.3),
    "attention.softcap": ({"cap": 30.0}, 30.0),
    "attention.clip_qkv": ({"clip": 1.0}, 1.0),
    "attention.window": ({"window": 9}, 9),
    "attention.mask": ({"causal": False}, "not causal"),
    "rope.theta": ({"theta": 5e5}, 5e5),
    "rope.pairing": ({"pairing": "adjacent"}, "adjacent"),
    "rope.partial": ({"d_rot": 16}, 16),
    "rope.offset": ({"offset_positions": 1}, 1.0),
    "rope.scaling": ({"scaling": eightfold}, {"rope_type": "linear", "factor": 8.0}),
    "norm.eps": ({"eps": 1e-3}, 1e-3),
    "norm.offset": ({"norm_offset": 0.0}, 0.0),
    "norm.kind": ({"kind": "layer"}, "layer"),
    "mlp.activation": ({"act": "gelu"}, "gelu"),
    "mlp.gate_up": ({"swapped": True}, "up activated"),
    "embed.scale": ({"embed_scale": 3.0}, 3.0),
    "residual.stream": ({"stream": 0.5}, 0.5),
    "logits.softcap": ({"logit_cap": 30.0}, 30.0),
    "logits.scale": ({"logit_scale": 0.5}, 0.5),
    "logits.shift": ({"centred": True}, "centred"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fits_of(candidate, reference, knobs=None):
    sides = (evidence(port, side, knobs=knobs or spec_of(PORT)) for port, side in
             ((candidate, "candidate"), (reference, "reference")))  # fmt: skip
    return causes(*sides, None)


@pytest.mark.parametrize("hide", [(), HIDDEN], ids=["visible", "hidden"])
@pytest.mark.parametrize("knob", FAULTS)
def test_a_fault_is_named_with_its_value_and_nothing_else(knob, hide):
    changes, truth = FAULTS[knob]
    found = fits_of(PORT.but(hide=hide, **changes), PORT.but(hide=hide))

    wrong = {fit.knob: fit for fit in found.candidate if fit.value != {r.site + str(r.layer): r.value for r in found.reference if
             r.knob == fit.knob}[fit.site + str(fit.layer)]}  # fmt: skip
    assert set(wrong) == {knob}
    assert wrong[knob].value == (truth if isinstance(truth, (str, dict)) else pytest.approx(truth, rel=1e-5, abs=1e-6))


def test_a_clean_port_has_no_cause():
    found = fits_of(PORT, PORT)

    assert found.candidate == found.reference == []


def test_a_reference_that_departs_is_fitted_like_a_candidate():
    found = fits_of(PORT, PORT.but(scale=12.3))

    assert {fit.value for fit in found.candidate} == {16.0}
    assert [fit.value for fit in found.reference] == pytest.approx([12.3] * PORT.n_layers, rel=1e-6)


def test_a_fault_of_one_layer_is_of_that_layer():
    findings, gaps = identify_by_formula(
        evidence(PORT.but(scale=(16.0, 11.0)), "candidate", knobs=spec_of(PORT)),
        evidence(PORT, "reference", knobs=spec_of(PORT)), {"scores"},
    )  # fmt: skip

    assert [(item.knob, item.layers, item.departs_from_spec) for item in findings] == [
        ("attention.scale", (1,), "candidate")
    ]
    assert gaps == []


def test_what_no_knob_explains_is_not_explained():
    broken = evidence(PORT, "candidate", knobs=spec_of(PORT))
    layer = broken[0]
    noise = torch.Generator().manual_seed(0)

    def tensor(probe, site):
        found = layer.tensor(probe, site)
        return found if site != "attn_scores" else found + 0.01 * torch.randn(found.shape, generator=noise)

    broken[0] = type(layer)(**{**vars(layer), "tensor": tensor})
    found = causes(broken, evidence(PORT, "reference", knobs=spec_of(PORT)), {"scores"})

    assert found.candidate == []


def test_rounding_is_far_below_the_limit_of_what_counts_as_an_explanation():
    """The bound holds for the port's own rounding with room, and a tenth of it would not."""
    side = evidence(PORT, "reference", knobs=spec_of(PORT))
    own = side_of(side)
    worst = max(
        left for site in sites_with_formula(side)
        if (parts := own.shown(site)) and math.isfinite(left := residual(own.residuals, parts))
    )  # fmt: skip
    step = torch.finfo(torch.float32).eps
    assert MANY_ROUNDINGS * step / 100 < worst < MANY_ROUNDINGS * step


def test_what_the_reference_makes_without_rounding_the_candidate_may_round_once():
    """Rows of a table are exact; a factor on them is rounded."""
    plain = PORT.but(embed_scale=1.0)
    sides = (evidence(port, side, knobs=spec_of(plain)) for port, side in
             ((plain.but(embed_scale=1.37), "candidate"), (plain, "reference")))  # fmt: skip

    (found,) = causes(*sides, {"embed"}).candidate
    assert (found.knob, found.value) == ("embed.scale", pytest.approx(1.37, rel=1e-6))


def first_of(knob, **changes):
    return next(fit for fit in fits_of(PORT.but(**changes), PORT).candidate if fit.knob == knob)


def test_the_picture_of_a_scale_has_the_scores_on_the_fitted_law():
    points = torch.tensor(first_of("attention.scale", scale=12.3).evidence["points"], dtype=torch.float64)

    products, seen, law = points.unbind(-1)
    assert len(points) == PICTURE_POINTS
    assert bool((products.diff() >= 0).all())
    torch.testing.assert_close(law, products / 12.3, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen, law, rtol=1e-4, atol=1e-4)


def test_the_picture_of_a_base_has_its_frequencies():
    drawn = first_of("rope.theta", theta=5e5).evidence["inv_freq"]

    d_rot = 2 * len(drawn)
    assert drawn == pytest.approx([5e5 ** (-2 * pair / d_rot) for pair in range(len(drawn))], rel=1e-5)


def test_a_cap_of_thousands_that_rounding_cannot_tell_from_none_is_none():
    """Rounding of 1e-5 hides the bend x^3 / 3 c^2 of a cap c = 5773, which alone would leave a little less."""
    x = torch.linspace(-5, 5, 201, dtype=torch.float64)
    rounding = 1e-5 * torch.randn(201, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bend = x**3 / x.pow(3).norm()
    seen = x - 1e-8 * x**3 + rounding - (rounding @ bend) * bend

    def difference(cap):
        return capped(x, cap) - seen

    assert float(difference(5773.0).norm()) < float(difference(None).norm())
    assert fitted(KNOBS["attention.softcap"], difference, 50.0, 0).value is None


def test_a_cap_that_is_lost_in_one_layer_is_of_that_layer():
    capped = PORT.but(cap=50.0)
    findings, _ = identify_by_formula(
        evidence(capped.but(cap=(50.0, None)), "candidate", knobs=spec_of(capped)),
        evidence(capped, "reference", knobs=spec_of(capped)), {"scores"},
    )  # fmt: skip

    assert [(item.knob, item.candidate_value, item.layers) for item in findings] == [("attention.softcap", None, (1,))]
    assert [places_of(item) for item in findings] == [{"blocks.1.attn_scores"}]


@pytest.mark.parametrize("hide", [(), HIDDEN], ids=["visible", "hidden"])
def test_a_cap_that_is_lost_beside_another_scale_is_none(hide):
    capped = PORT.but(cap=50.0, hide=hide)
    findings, _ = identify_by_formula(
        evidence(capped.but(cap=None, scale=15.0), "candidate", knobs=spec_of(capped)),
        evidence(capped, "reference", knobs=spec_of(capped)), OF_PAIRS,
    )  # fmt: skip

    assert {(item.knob, item.candidate_value) for item in findings} == {
        ("attention.softcap", None),
        ("attention.scale", 15.0),
    }


def test_an_order_that_half_of_a_block_contradicts_is_not_its_order():
    """A gate of the raw stream would be that of a block that normalises its outputs; what it is multiplied with is not."""
    broken = evidence(PORT, "candidate", knobs=spec_of(PORT))
    plain = broken[0]

    def tensor(probe, site):
        found = plain.tensor(probe, site)
        if site != "mlp.pre":
            return found
        return (plain.tensor(probe, "resid_mid").double() @ plain.weight("mlp.gate").double().T).to(found)

    broken[0] = type(plain)(**{**vars(plain), "tensor": tensor})
    found = causes(broken, evidence(PORT, "reference", knobs=spec_of(PORT)), {"mlp"})

    assert found.candidate == []


PAIRS = {
    "two numbers": ({"scale": 12.3, "cap": 30.0}, {"attention.scale": 12.3, "attention.softcap": 30.0}),
    "a base that a wrong pairing hides": (
        {"theta": 5e5, "pairing": "adjacent"}, {"rope.theta": 5e5, "rope.pairing": "adjacent"},
    ),
    "a base and fewer rotated components": ({"theta": 5e5, "d_rot": 16}, {"rope.theta": 5e5, "rope.partial": 16}),
    "a window and a mask": ({"window": 9, "causal": False}, {"attention.window": 9, "attention.mask": "not causal"}),
    "a number that is zero": ({"eps": 1e-3, "norm_offset": 0.0}, {"norm.eps": 1e-3, "norm.offset": 0.0}),
    "two choices": ({"act": "silu", "swapped": True}, {"mlp.activation": "silu", "mlp.gate_up": "up activated"}),
    "three": (
        {"scale": 12.3, "cap": 30.0, "window": 9},
        {"attention.scale": 12.3, "attention.softcap": 30.0, "attention.window": 9},
    ),
}  # fmt: skip
OF_PAIRS = {"scores", "pattern", "z", "rope", "norm", "final_norm", "mlp"}


@pytest.mark.parametrize("hide", [(), HIDDEN], ids=["visible", "hidden"])
@pytest.mark.parametrize("case", PAIRS)
def test_knobs_that_are_wrong_together_at_one_site_are_each_named_and_nothing_else(case, hide):
    changes, truth = PAIRS[case]
    findings, _ = identify_by_formula(
        evidence(PORT.but(hide=hide, **changes), "candidate", knobs=spec_of(PORT)),
        evidence(PORT.but(hide=hide), "reference", knobs=spec_of(PORT)), OF_PAIRS,
    )  # fmt: skip

    said = {item.knob: item.candidate_value for item in findings}
    assert said == {
        knob: value if isinstance(value, str) else pytest.approx(value, rel=1e-4) for knob, value in truth.items()
    }
    assert {item.layers for item in findings} == {None}


def test_what_is_found_in_one_text_is_held_where_another_does_not_show_it(monkeypatch):
    """One batch shows of an MLP what enters the norm in front of it, and what is wrong in that is wrong in it too."""
    unseen, searched = ("ln2.out", "mlp.pre", "mlp.pre_linear"), []

    def side(port, name):
        def shown(own):
            return lambda at, site: None if at == "ragged" and site in unseen else own.tensor(at, site)

        whole = evidence(port, name, knobs=spec_of(PORT))
        return {layer: dataclasses.replace(own, tensor=shown(own)) for layer, own in whole.items()}

    def counted(residuals, parts, *limits):
        searched.append(parts[0].site)
        return explanations(residuals, parts, *limits)

    monkeypatch.setattr("parity_audit.diagnose.fit.causes.explanations", counted)
    found = causes(side(PORT.but(eps=1e-3, act="silu"), "candidate"), side(PORT, "reference"), {"norm", "mlp"})

    wrong = {(fit.knob, fit.layer, fit.value) for fit in found.candidate}
    assert wrong == {
        (knob, at, value) for at in (0, 1) for knob, value in (("norm.eps", 1e-3), ("mlp.activation", "silu"))
    }
    assert searched == ["blocks.0.ln1.out", "blocks.0.mlp.post"]


def test_two_scales_that_say_the_same_are_one_cause():
    """A divisor of the scores and a temperature of the softmax are the same function where scores are hidden."""
    found = fits_of(PORT.but(hide=HIDDEN, scale=12.3), PORT.but(hide=HIDDEN))

    assert {fit.knob for fit in found.candidate} == {"attention.scale"}


def test_a_scaling_that_is_dropped_is_said_so_and_not_as_the_base_that_it_makes():
    """`alpha` is the same function as another base; that there is none is a choice, and the base a free number."""
    raised = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    knobs = spec_of(PORT, rope__scaling=raised)
    right = PORT.but(theta=PORT.theta * 1000.0 ** (PORT.d_head / (PORT.d_head - 2)))
    found = fits_of(PORT, right, knobs)

    assert {(fit.knob, fit.value) for fit in found.candidate} == {("rope.scaling", None)}
    assert {str(fit.value) for fit in found.reference} == {str(raised)}


def test_an_error_of_what_attention_adds_is_looked_for_in_the_norm_behind_it():
    """Where a block has such a norm, its output is what attention adds, and only that site is judged."""
    g = torch.Generator().manual_seed(0)
    weight, given = torch.randn(PORT.d_model, generator=g), 0.01 * torch.randn(1, 40, PORT.d_model, generator=g)
    one = PROBES[:1]

    def seen(eps):
        unit = given.double() / (given.double().square().mean(-1, keepdim=True) + eps).sqrt()
        made = (unit * (1.0 + weight)).float()
        sites = {"attn_proj": given, "ln1_post.out": made, "attn_out": made}
        side = evidence(PORT, knobs=spec_of(PORT), probes=one)
        return {
            layer: dataclasses.replace(
                own, tensor=lambda _, site: sites.get(site), weight=lambda role: weight if role == "norm.ln1_post" else None
            )
            for layer, own in side.items() if layer == 0
        }  # fmt: skip

    (finding,), _ = causes_at(seen(1e-3), seen(PORT.eps), ["blocks.0.attn_out"])

    assert (finding.knob, finding.candidate_value, finding.site) == ("norm.eps", 1e-3, "blocks.0.ln1_post.out")


def test_norms_of_the_reference_that_depart_explain_what_reads_those_that_the_candidate_hides():
    """A port with folded norms shows none of them; what its reference makes of its own is judged by what reads it."""
    hidden = ("ln1.out", "ln2.out", "ln_final.out")
    findings = found(PORT.but(hide=hidden), PORT.but(eps=1e-3), norm__eps=PORT.eps)

    assert findings.keys() == {"norm.eps"}
    assert findings["norm.eps"].candidate_value == pytest.approx(PORT.eps, rel=1e-3)
    assert findings["norm.eps"].reference_value == pytest.approx(1e-3, rel=1e-3)
    assert findings["norm.eps"].departs_from_spec == "reference"
