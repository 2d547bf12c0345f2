"""The formulas with a spec's values against the judge: transformers in true float64, for every shipped architecture."""

import pytest
import transformers
from architectures import Architecture
from judged import apart, judged

from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model

MODELS = {spec.name: next(iter(spec.content.models)) for spec in list_specs()}
COMPONENT = 1e-10
"""What one component may be off: float64 rounding is 1e-15, a number that a program rounds to float32 is off by 1e-8."""
CHAIN = 1e-9


@pytest.fixture(scope="module", params=sorted(MODELS))
def architecture(request, cache, tmp_path_factory):
    transformers.logging.set_verbosity_error()
    made = Architecture(resolve_model(MODELS[request.param]), cache, tmp_path_factory.mktemp(request.param))
    made.probe = made.probes["left_padded"]
    return made


def test_every_component_and_the_whole_model_are_those_of_the_judge(architecture):
    case = judged(architecture)
    sites = case.judge.sites

    assert set(sites) <= set(case.components.sites())
    off = {site: apart(site, case.components.computed(site), tensor, case.real) for site, tensor in sites.items()}
    assert {site: distance for site, distance in off.items() if not distance <= COMPONENT} == {}
    assert apart("logits", case.chain.computed("logits"), sites["logits"], case.real) <= CHAIN
