"""The three engines themselves, by the command line, on the Gemma-2 miniature."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.core.invariance_report import Invariance

pytestmark = pytest.mark.engine
WITHIN = {Invariance.BITWISE.value, Invariance.CLASS_ONLY.value, Invariance.NUMERIC.value}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("invariance")
    sizes = ("--max-batch", "5", "--completions", "2", "--new-tokens", "3")
    backends = ("-c", "hf", "-c", "transformer_lens", "-c", "vllm")
    result = CliRunner().invoke(
        app, ["invariance", "gemma-2-2b-it", "--miniature", *backends, *sizes, "--out", str(out)]
    )
    assert (out / "invariance.json").is_file(), result.output
    return result, json.loads((out / "invariance.json").read_text()), (out / "invariance.html").read_text()


def _axes(candidate):
    return {axis["name"]: axis for axis in (*candidate["axes"], *candidate["run_to_run"])}


def test_three_engines_depend_on_the_batch_by_rounding_at_most(ran):
    result, report, _ = ran

    assert result.exit_code == report["exit_code"] == 0, result.output
    assert [one["package"] for one in report["candidates"]] == ["transformers", "transformer-lens", "vllm"]
    for candidate in report["candidates"]:
        axes = _axes(candidate)
        assert candidate["verdict"] in WITHIN, candidate["why"]
        assert {
            "batch, prefill",
            "batch, decode",
            "cached decode",
            "chunked prefill",
            "repeat",
            "fresh process",
        } <= axes.keys()
        assert {axis["name"] for axis in axes.values() if axis["verdict"] is None} <= {"prefix cache"}
        assert {axis["verdict"] for axis in axes.values() if axis["verdict"] is not None} <= WITHIN
        assert axes["repeat"]["verdict"] == axes["fresh process"]["verdict"] == "bitwise"
        assert candidate["completions"]["unique"] == 1


def test_the_negative_control_fires_and_the_first_operation_is_named(ran):
    """An engine that has the same bits in every batch, as vLLM in one thread of some CPUs, is told to have shown nothing."""
    fired = [candidate for candidate in ran[1]["candidates"] if candidate["control"]["fired"]]
    silent = [candidate for candidate in ran[1]["candidates"] if not candidate["control"]["fired"]]

    assert fired
    for candidate in fired:
        assert candidate["first_operation"]
        assert candidate["first_site"].startswith("blocks.0.")
    for candidate in silent:
        assert {axis["verdict"] for axis in _axes(candidate).values() if axis["name"].startswith("batch")} == {
            "bitwise"
        }
        assert "may be too weak to see a difference" in candidate["why"]


def test_the_prefix_cache_of_the_engine_was_hit_as_arranged(ran):
    _, report, _ = ran
    prefix = _axes(report["candidates"][2])["prefix cache"]

    assert {one["name"]: one["facts"]["cached_prompt_tokens"] for one in prefix["conditions"]} == {
        "hot": 256, "127 tokens shared": 0, "128 tokens shared": 128, "129 tokens shared": 128,
    }  # fmt: skip
    assert {one["name"] for one in prefix["conditions"] if one["verdict"] == "bitwise"} >= {"127 tokens shared"}


def test_batches_and_chunks_of_the_engine_are_those_of_its_scheduler(ran):
    axes = _axes(ran[1]["candidates"][2])
    batches = {one["name"]: one["facts"]["requests_per_step"] for one in axes["batch, decode"]["conditions"]}
    chunks = {one["name"]: one["facts"]["tokens_per_step"] for one in axes["chunked prefill"]["conditions"]}

    assert batches == {"2": 2, "3": 3, "4": 4, "5": 5}
    assert {"15": 15, "16": 16, "17": 17, "28": 28}.items() <= chunks.items()


def test_the_operations_have_the_models_own_names_and_shapes(ran):
    hf, lens, vllm = ({one["name"]: one for one in candidate["operations"]} for candidate in ran[1]["candidates"])

    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm", "lm_head", "log_softmax"} <= hf.keys()
    assert "blocks.0.self_attn.q_proj" in lens
    assert {"model.layers.0.self_attn.qkv_proj", "compute_logits", "log_softmax"} <= vllm.keys()


def test_the_report_says_it_on_every_medium(ran):
    result, report, page = ran

    for text in (result.output, page):
        assert "classes of equal bits" in text
        assert "prefix cache" in text
    assert report["candidates"][2]["not_tested"]
