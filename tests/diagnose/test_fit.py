"""The search for one knob on functions whose answer is known, and on the judge of a miniature."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from architectures import Architecture

from parity_audit.core.progress import SILENT
from parity_audit.diagnose.fit.residuals import Component, Residuals, changed
from parity_audit.diagnose.fit.search import ENUMERATED, FLOAT64_RESIDUAL, SAME_WITHIN, fitted
from parity_audit.diagnose.fit.settings import Explanation, starts_of
from parity_audit.formulas.decoder import decoder_of
from parity_audit.formulas.knobs import KNOBS
from parity_audit.formulas.stored import CheckpointTensors
from parity_audit.speccheck.constants import contradictions
from parity_audit.speccheck.judged import judged_components
from parity_audit.specs.facts import decoder_facts
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import resolve_model

X = torch.linspace(-3, 3, 41, dtype=torch.float64)


def cap(value):
    return X if value is None else value * torch.tanh(X / value)


@pytest.mark.parametrize(("knob", "truth", "start"), [
    ("attention.softcap", 2.5, 50.0), ("attention.softcap", None, 5.0), ("attention.softcap", 2.5, None),
])  # fmt: skip
def test_a_cap_is_found_from_another_and_from_none(knob, truth, start):
    found = fitted(KNOBS[knob], lambda value: cap(value) - cap(truth), start, 0)

    assert found.residual < FLOAT64_RESIDUAL
    assert found.value == truth if truth is None else math.isclose(found.value, truth, rel_tol=1e-9)


def test_a_shift_may_be_negative():
    found = fitted(KNOBS["norm.offset"], lambda value: (value + 1.25) * X, 0.0, 0)

    assert math.isclose(found.value, -1.25, rel_tol=1e-9)


def test_a_whole_number_beyond_enumeration_is_narrowed_down():
    found = fitted(
        KNOBS["attention.window"],
        lambda value: None if value is None else torch.tensor([abs(value - 1023) / 4096.0]),
        900,
        4160,
    )

    assert found.value == 1023


def test_choices_with_a_number_are_narrowed_down_in_a_long_text_and_not_tried_one_by_one():
    """A text of 4160 tokens: each try computes its attention, and 4160 tries of every such choice took half an hour."""
    tried = []

    def difference(value):
        tried.append(value)
        count = int(value.split()[3]) if value.startswith("a prefix of ") else 4160
        return torch.tensor([abs(count - 1023) / 4096.0])

    found = fitted(KNOBS["attention.mask"], difference, "causal", 4160)

    assert found.value == "a prefix of 1023 tokens sees itself whole"
    assert len(tried) < ENUMERATED


@pytest.mark.parametrize("limit", [80, 256])
def test_a_whole_number_without_a_slope_towards_it_is_enumerated(limit):
    """Rotated components of Phi-2's heads of 80 and of Gemma's of 256: every wrong number leaves about the same."""
    found = fitted(KNOBS["rope.partial"], lambda value: torch.tensor([0.0 if value == 46 else 0.5]), 30, limit)

    assert (found.value, found.residual) == (46, 0.0)


def test_one_number_of_a_dictionary_is_found():
    truth, start = {"factor": 8.0, "low": [1.0, 2.0]}, {"factor": 8.0, "low": [1.0, 3.0]}

    def off(value):
        return (
            None
            if value is None or "low" not in value
            else torch.tensor([value["factor"] - 8.0, value["low"][0] - 1.0, value["low"][1] - 2.0]).double()
        )

    found = fitted(KNOBS["rope.scaling"], off, start, 0)

    assert found.value["factor"] == truth["factor"]
    assert found.value["low"] == pytest.approx(truth["low"], rel=1e-9)


def test_a_choice_that_changes_nothing_is_not_held_while_others_are_searched():
    """The order of queries in a formula that is given them rotated: sets with it would stand in the way of others."""
    whole = 0.05
    tried = [
        Explanation(values={"attention.cut": "head pos d_head of queries"}, residual=whole),
        Explanation(values={"attention.mask": "no mask"}, residual=0.9),
        Explanation(values={"attention.scale": 22.0}, residual=0.01),
    ]

    assert [one.values for one in starts_of(tried, whole, whole / SAME_WITHIN)] == [
        {"attention.scale": 22.0},
        {"attention.mask": "no mask"},
    ]


def test_what_no_value_explains_is_left():
    found = fitted(KNOBS["embed.scale"], lambda value: torch.ones(3, dtype=torch.float64) + 0 * X[:3], 1.0, 0)

    assert found.residual > 1


@pytest.fixture(scope="module")
def evidence(cache, tmp_path_factory):
    """Gemma-2's judge on one probe, and its components."""
    transformers.logging.set_verbosity_error()
    made = Architecture(resolve_model("gemma-2-2b-it"), cache, tmp_path_factory.mktemp("gemma2"))
    made.probe = made.probes["left_padded"]
    sites = made.judge.sites
    facts, stored = decoder_facts(made.model.spec, made.config), CheckpointTensors(Path(made.checkpoint.path))
    decoder = decoder_of(facts, stored, torch.float64)
    residuals = Residuals(decoder=decoder, captured=lambda probe, site: sites.get(site))
    bare = [Component(probe=made.probe, site=site) for site in sites]
    asked = [
        Component(probe=made.probe, site=one.site, knobs=residuals.asked(one, residuals.decoder.values)) for one in bare
    ]
    return residuals, asked


def test_the_spec_is_not_contradicted(evidence):
    residuals, components = evidence

    assert contradictions(residuals, components, residuals.decoder.values) == []


@pytest.mark.parametrize(("knob", "wrong", "right"), [
    ("attention.scale", 224**0.5, 16.0), ("attention.softcap", None, 50.0), ("logits.softcap", 20.0, 30.0),
    ("norm.offset", 0.0, 1.0), ("rope.theta", 500000.0, 10000.0), ("mlp.activation", "gelu", "gelu_pytorch_tanh"),
])  # fmt: skip
def test_a_wrong_constant_is_contradicted_with_the_value_of_the_reference(evidence, knob, wrong, right):
    residuals, components = evidence
    count = residuals.decoder.dims["n_layers"]
    values = changed(residuals.decoder.values, knob, wrong, range(count), count)

    found = contradictions(residuals, components, values)

    assert [one.knob for one in found] == [knob]
    assert found[0].fitted == (right if isinstance(right, str) else pytest.approx(right, rel=1e-8))
    assert found[0].layers == (() if knob.startswith("logits") else tuple(range(count)))


def test_two_wrong_constants_and_one_layer_alone(evidence):
    residuals, components = evidence
    count = residuals.decoder.dims["n_layers"]
    values = changed(residuals.decoder.values, "norm.eps", 1e-5, [2], count)
    values = changed(values, "embed.scale", 1.0, range(count), count)

    found = {one.knob: one for one in contradictions(residuals, components, values)}

    assert set(found) == {"embed.scale", "norm.eps"}
    assert found["norm.eps"].layers == (2,)
    assert found["norm.eps"].fitted == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize(("spec", "knob", "right", "wrong"), [
    # What a sequential Cohere's MLP reads is its attention's norm too where norms stand behind sums; its norms do not.
    ("cohere", "residual.parallel", True, False),
    # Queries at the end of a text of 64 chunks are served alike by chunks of 64 tokens and of 128, and 129 has no slope.
    ("llama4", "attention.chunk", 128, 129),
])  # fmt: skip
def test_a_wrong_constant_is_contradicted_by_its_name_and_the_value_of_the_reference(cache, spec, knob, right, wrong):
    with judged_components(load_spec(spec), 0, SILENT) as (residuals, components):
        own = residuals.decoder.values[knob]
        layers = [layer for layer, value in enumerate(own) if value == right]
        values = changed(residuals.decoder.values, knob, wrong, layers, len(own))

        found = contradictions(residuals, components, values, of=[one for one in components if knob in one.knobs])

    assert [(one.knob, one.fitted) for one in found] == [(knob, right)]
