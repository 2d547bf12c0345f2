"""Every architecture that has a spec, on its miniature: sites live, the residual stream adds up, knobs do something."""

import pytest
import transformers
from architectures import OTHER_BLOCKS, VERSION, Architecture, apart, moved
from safetensors.torch import load_file

from parity_audit.checks.preflight import config_warnings
from parity_audit.specs import settings, view
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model

MODELS = {spec.name: spec.first_model for spec in list_specs()} | OTHER_BLOCKS
ROUNDING = 2e-7
FLOOR = 2e-5
FLOORS_TO_MOVE = 100.0


@pytest.fixture(scope="module", params=sorted(MODELS))
def architecture(request, cache, tmp_path_factory):
    transformers.logging.set_verbosity_error()
    return Architecture(resolve_model(MODELS[request.param]), cache, tmp_path_factory.mktemp(request.param))


def test_every_site_is_live(architecture):
    shown = architecture.native

    assert not shown.reply.not_visible
    assert shown.sites.keys() == {tap.site for tap in architecture.taps}
    assert all(entry.non_finite == 0 for entry in shown.reply.entries)


def test_the_residual_stream_adds_up(architecture):
    sites = architecture.native.sites
    stored = load_file(f"{architecture.checkpoint.path}/model.safetensors")
    for layer in range(architecture.n_layers):
        block = {name: sites.get(f"blocks.{layer}.{name}") for name in ("resid_pre", "resid_mid", "resid_post")}
        attn, mlp = (sites[f"blocks.{layer}.{name}"] for name in ("attn_out", "mlp_out"))
        if f"blocks.{layer}.altup.pre" in sites:
            assert streams_add_up(sites, f"blocks.{layer}.", attn, mlp) < ROUNDING
            continue
        if block["resid_mid"] is None:
            assert apart(block["resid_pre"] + attn + mlp, block["resid_post"]) < ROUNDING
        else:
            assert apart(block["resid_pre"] + attn, block["resid_mid"]) < ROUNDING
            own = sites.get(f"blocks.{layer}.per_layer.out")
            total = block["resid_mid"] + mlp + (0.0 if own is None else own)
            assert apart(total * stored.get(f"model.layers.{layer}.layer_scalar", 1.0), block["resid_post"]) < ROUNDING


def streams_add_up(sites, block, attn, mlp):
    """The sums of a block with several streams, the first of which is active; the largest distance."""
    laurel, own, made = (sites[block + name] for name in ("laurel.out", "per_layer.out", "altup.activated"))
    corrected, post = sites[block + "altup.corrected"], sites[block + "altup.post"]
    return max(
        apart(sites[block + "altup.pre"][..., 0, :], sites[block + "resid_pre"]),
        apart(sites[block + "altup.predicted"][..., 0, :], sites[block + "altup.active"]),
        apart((sites[block + "altup.active"] + attn + laurel) / 2**0.5, sites[block + "resid_mid"]),
        apart(sites[block + "resid_mid"] + mlp, made),
        apart(corrected[..., 1:, :] + own[..., None, :], post[..., 1:, :]),
        apart(corrected[..., 0, :], sites[block + "resid_post"]),
    )


def test_the_judge_differs_from_float32_by_rounding(architecture):
    native, judge = architecture.native.sites, architecture.judge.sites

    assert native.keys() == judge.keys()
    far = {site: apart(native[site], judge[site]) for site in native}
    assert 0 < far["logits"] < FLOOR
    assert max(far.values()) < FLOOR


def test_live_settings_are_what_the_spec_says(architecture):
    spec, config = architecture.model.spec, architecture.config
    live = view.effective_values(spec, "hf", architecture.backend.describe(), config)

    assert live
    assert config_warnings(view.spec_values(spec, config), live, "hf") == []


def test_every_knob_that_can_be_set_moves_the_logits(architecture):
    spec, config = architecture.model.spec, architecture.config
    clean = architecture.native.sites["logits"]
    floor = apart(clean, architecture.judge.sites["logits"])
    silent = {}
    for knob, known in view.knob_values(spec, config).items():
        value = moved(known.value, knob)
        edits = value is not None and settings.edits(spec, "hf", knob, value, config, VERSION, {})
        if edits and (ratio := apart(architecture.logits_with(edits), clean) / floor) < FLOORS_TO_MOVE:
            silent[knob] = ratio

    assert silent == {}
