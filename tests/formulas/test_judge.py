"""The formulas with a spec's values against the judge: transformers in true float64, for every shipped architecture."""

import pytest
import transformers
from architectures import OTHER_BLOCKS, Architecture
from judged import apart, judged
from safetensors.torch import load_file, save_file

from parity_audit.backends.spec import SpecBackend
from parity_audit.core.sites import local_name, site_order
from parity_audit.core.types import Edit
from parity_audit.core.wire import FLOAT64, NATIVE, ApplyRequest, LoadRequest, RunRequest
from parity_audit.diagnose.diagnosis import DETAIL_SITES
from parity_audit.diagnose.fit.sides import MATRICES, OF_THE_LENGTH
from parity_audit.specs.facts import decoder_facts
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.settings import edits
from parity_audit.specs.view import taps

MODELS = {spec.name: spec.first_model for spec in list_specs()} | OTHER_BLOCKS
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
    assert apart("logits", spec_logits(architecture, FLOAT64), sites["logits"], case.real) <= CHAIN


def test_what_a_site_is_made_of_stands_before_it(architecture):
    chain = judged(architecture).chain
    chain.computed("logits")

    read = {(site, one) for site, inputs in chain.read.items() for one in inputs}
    assert {(site, one) for site, one in read if site_order(one) >= site_order(site)} == set()
    assert {f"blocks.0.{name}" for name in ("attn_proj", "mlp_proj")} <= {one for _, one in read}


def test_what_attention_is_made_of_is_captured_of_long_texts_too(architecture):
    """Else an error of it would be one of the rotation, which is made of it."""
    chain = judged(architecture).chain
    chain.computed("logits")

    read = {
        local_name(one)
        for site, inputs in chain.read.items()
        if local_name(site) in OF_THE_LENGTH and site.startswith("blocks.")
        for one in inputs
    }
    assert read
    assert read <= {*DETAIL_SITES, *MATRICES}


def loaded(architecture, settings=None):
    backend = SpecBackend()
    facts = decoder_facts(architecture.model.spec, architecture.config)
    request = LoadRequest(
        checkpoint=architecture.checkpoint, dtype="float32", device="cpu", decoder=facts, settings=settings or {}
    )
    backend.load(request)
    return backend


def spec_logits(architecture, precision, backend=None, **request):
    architecture.runs += 1
    own = taps(architecture.model.spec, "spec", architecture.config, "")
    wanted = RunRequest(
        probe=architecture.probe, taps=tuple(tap for tap in own if tap.site == "logits" or tap.site in request.get("inputs", ())),
        out=str(architecture.out / str(architecture.runs)), precision=precision, returned=True, **request,
    )  # fmt: skip
    reply = (backend or loaded(architecture)).run(wanted, lambda text: None)
    assert not reply.not_visible
    returned = next(entry for entry in reply.entries if entry.site == "returned")
    return load_file(architecture.out / str(architecture.runs) / returned.file)["x"]


@pytest.fixture(scope="module")
def gemma2(cache, tmp_path_factory):
    made = Architecture(resolve_model("gemma-2-2b-it"), cache, tmp_path_factory.mktemp("spec"))
    made.probe = made.probes["left_padded"]
    return made


def test_a_spec_in_float32_is_off_by_float32_rounding(gemma2):
    case = judged(gemma2)

    off = apart("logits", spec_logits(gemma2, NATIVE).double(), case.judge.sites["logits"], case.real)
    assert 1e-8 < off < 2e-6


def test_a_value_is_set_live_and_by_a_setting_and_undone(gemma2):
    case, backend = judged(gemma2), loaded(gemma2)
    right = spec_logits(gemma2, FLOAT64, backend)
    (edit,) = edits(gemma2.model.spec, "spec", "attention.scale", 224**0.5, gemma2.config, "", {})

    (back,) = backend.apply(ApplyRequest(edits=(edit,)))
    wrong = spec_logits(gemma2, FLOAT64, backend)
    backend.apply(ApplyRequest(edits=()))

    assert edit == Edit(op="knob", path="attention.scale", value=[224**0.5] * 4)
    assert back.changed
    assert apart("logits", wrong, right, case.real) > 1e-3
    assert spec_logits(gemma2, FLOAT64, backend).equal(right)
    set_at_load = loaded(gemma2, {"attention.scale": 224**0.5})
    assert spec_logits(gemma2, FLOAT64, set_at_load).equal(wrong)


def test_a_replay_goes_on_from_what_it_is_given(gemma2):
    judge, site = gemma2.judge, "blocks.1.resid_post"
    given = {site: str(gemma2.out / "given.safetensors")}
    save_file({"x": judge.sites[site]}, given[site])
    backend = loaded(gemma2, {"embed.scale": 1.0})

    logits = spec_logits(gemma2, FLOAT64, backend, inputs=given)
    assert apart("logits", logits, judge.sites["logits"], judged(gemma2).real) <= CHAIN
    assert apart("logits", spec_logits(gemma2, FLOAT64, backend), judge.sites["logits"], judged(gemma2).real) > 1e-3
