"""Blocks that a program does not run (nothing in them is seen, and the stream behind them says which), or wires in another way."""

import judged
import pytest
from architectures import Architecture

from parity_audit.diagnose.fit.explain import explanations
from parity_audit.diagnose.fit.residuals import Component, Residuals
from parity_audit.diagnose.fit.site_residual import explains, values_with_setting, with_residual
from parity_audit.formulas.choices import BLOCK_BEFORE, FIRST_NORM, OF_FIRST, OF_SECOND, OF_SECOND_WITHIN, OWN
from parity_audit.formulas.decoder import Run
from parity_audit.specs.resolve import resolve_model

LIMIT = 1e-9


@pytest.fixture(scope="module")
def architecture(cache, tmp_path_factory):
    return Architecture(resolve_model("llama-3.2-1b"), cache, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def decoder(architecture):
    return judged.decoder(architecture)


@pytest.fixture(scope="module")
def batch(architecture):
    return judged.batch_of(architecture.probe)


def said(decoder, probe, site, captured):
    residuals = Residuals(decoder=decoder, captured=lambda name, asked: captured.get(asked))
    return explanations(residuals, [Component(probe=probe, site=site)], LIMIT, LIMIT / 100)[0].values


def test_a_block_that_is_skipped(architecture, decoder, batch):
    stream = Run(decoder=decoder, batch=batch).computed("blocks.0.resid_post")
    captured = {"blocks.1.resid_pre": stream, "blocks.1.resid_post": stream}

    assert said(decoder, architecture.probe, "blocks.1.resid_post", captured) == {"residual.skipped": True}


@pytest.mark.parametrize("dropped", [1, 2])
def test_the_last_blocks_are_not_run(architecture, decoder, batch, dropped):
    last = architecture.n_layers - 1
    stream = Run(decoder=decoder, batch=batch).computed(f"blocks.{last - dropped}.resid_post")
    final = Run(decoder=decoder, batch=batch, given={f"blocks.{last}.resid_post": stream}.get).computed("ln_final.out")
    captured = {f"blocks.{last - dropped}.resid_post": stream, "ln_final.out": final}

    assert said(decoder, architecture.probe, "ln_final.out", captured) == {"residual.blocks_dropped": dropped}


@pytest.mark.parametrize("shows_second_norm", [False, True])
def test_the_mlp_reads_the_norm_that_attention_reads(architecture, decoder, batch, shows_second_norm):
    """As a block of one norm does (GPT-J): a program that calls the second norm and does not read it shows it all the same."""
    run = Run(decoder=decoder, batch=batch)
    first = run.computed("blocks.0.ln1.out")
    captured = {"blocks.0.resid_mid": run.computed("blocks.0.resid_mid"), "blocks.0.ln1.out": first}
    if shows_second_norm:
        captured["blocks.0.ln2.out"] = run.computed("blocks.0.ln2.out")
    wrong = Run(decoder=decoder, batch=batch, given={"blocks.0.ln2.out": first}.get)
    captured["blocks.0.mlp.pre"] = wrong.computed("blocks.0.mlp.pre")

    assert said(decoder, architecture.probe, "blocks.0.mlp.pre", captured) == {"mlp.input": FIRST_NORM}


def test_an_eps_that_no_norm_has_explains_nothing(architecture, decoder, batch):
    """An eps of 1e20 lets every sublayer add nothing, as in a block that is skipped."""
    stream = Run(decoder=decoder, batch=batch).computed("blocks.0.resid_post")
    captured = {"blocks.1.resid_pre": stream, "blocks.1.resid_post": stream}
    residuals = Residuals(decoder=decoder, captured=lambda name, asked: captured.get(asked))
    part = [Component(probe=architecture.probe, site="blocks.1.resid_post")]

    huge = with_residual(residuals, part, {"norm.eps": 1e22})

    assert huge.residual <= LIMIT
    assert not explains(residuals, part, huge, LIMIT)


def test_heads_that_a_layer_does_not_have_are_impossible_and_stop_no_search(architecture, decoder, batch):
    """In some models layers differ in how many heads of keys and values they have."""
    run = Run(decoder=decoder, batch=batch)
    captured = {f"blocks.0.{name}": run.computed(f"blocks.0.{name}") for name in ("rot_q", "rot_k", "attn_scores")}
    residuals = Residuals(decoder=decoder, captured=lambda name, asked: captured.get(asked))
    part = [Component(probe=architecture.probe, site="blocks.0.attn_scores")]
    heads, kv_heads = decoder.dims["n_heads"], decoder.dims["n_kv_heads"]

    assert with_residual(residuals, part, {"n_kv_heads": [kv_heads] * heads}).residual == float("inf")
    assert with_residual(residuals, part, {}).residual <= LIMIT


@pytest.mark.parametrize(
    ("setting", "lacks"),
    [
        ({}, False),
        ({"attention.sinks": OWN}, True),
        ({"attention.sinks": None}, False),
        ({"attention.temperature": "hot"}, False),
    ],
)
def test_values_that_ask_for_a_tensor_that_is_not_stored_are_told_from_impossible_ones(
    architecture, decoder, batch, setting, lacks
):
    run = Run(decoder=decoder, batch=batch)
    captured = {f"blocks.0.{name}": run.computed(f"blocks.0.{name}") for name in ("attn_scores", "pattern")}
    residuals = Residuals(decoder=decoder, captured=lambda name, asked: captured.get(asked))
    part = Component(probe=architecture.probe, site="blocks.0.pattern")

    assert residuals.lacks(part, values_with_setting(residuals, setting, 0)) is lacks


@pytest.mark.parametrize(("layer", "value", "block"), [(1, OF_SECOND, 1), (0, OF_SECOND, 0), (2, BLOCK_BEFORE, 1)])
def test_a_block_that_is_run_twice_as_the_stream_before_a_block_shows(
    architecture, decoder, batch, layer, value, block
):
    stream = Run(decoder=decoder, batch=batch).computed(f"blocks.{layer}.resid_pre")
    captured = {
        f"blocks.{layer}.resid_pre": made_of(decoder, batch, block, stream).computed(f"blocks.{block}.resid_post")
    }
    captured["embed" if layer == 0 else f"blocks.{layer - 1}.resid_post"] = stream

    assert said(decoder, architecture.probe, f"blocks.{layer}.resid_pre", captured) == {"residual.repeated": value}


@pytest.mark.parametrize("site", ["ln1.out", "resid_mid"])
def test_a_block_that_is_run_twice_within_a_hook(architecture, decoder, batch, site):
    stream = Run(decoder=decoder, batch=batch).computed("blocks.1.resid_pre")
    once = made_of(decoder, batch, 1, stream).computed("blocks.1.resid_post")
    captured = {"blocks.1.resid_pre": stream}
    captured |= {
        f"blocks.1.{name}": made_of(decoder, batch, 1, once).computed(f"blocks.1.{name}") for name in ("attn_out", site)
    }

    assert said(decoder, architecture.probe, f"blocks.1.{site}", captured) == {"residual.repeated": OF_SECOND_WITHIN}


def test_a_block_that_is_run_twice_and_shows_its_first_run(architecture, decoder, batch):
    run = Run(decoder=decoder, batch=batch)
    captured = {f"blocks.1.{name}": run.computed(f"blocks.1.{name}") for name in ("resid_mid", "mlp_out")}
    twice = made_of(decoder, batch, 1, run.computed("blocks.1.resid_post"))
    captured["blocks.1.resid_post"] = twice.computed("blocks.1.resid_post")

    assert said(decoder, architecture.probe, "blocks.1.resid_post", captured) == {"residual.repeated": OF_FIRST}


def made_of(decoder, batch, block, stream):
    """What a block makes of another stream."""
    return Run(decoder=decoder, batch=batch, given={f"blocks.{block}.resid_pre": stream}.get)
