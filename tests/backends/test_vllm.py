"""The real vLLM engine against transformers on the same miniature: weights to the bit, every site to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parity_audit.capture.plan import AuditPlan, plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import BackendFailed
from parity_audit.core.progress import SILENT
from parity_audit.core.types import Edit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MODELS = ["gemma-2-2b-it", "meta-llama/Llama-3.2-1B"]
PROBES = {MODELS[0]: (), MODELS[1]: ("short", "repeated", "ragged", "left_padded", "decode", "ids", "batch")}
"""All of them for Gemma-2; for Llama all but the longest, of 8256 tokens."""
LOGITS_AGREE = 2e-5
SITES_AGREE = 1e-4


def planned(model: str, cache: Path, *probes: str) -> AuditPlan:
    return plan_audit(
        model, synthetic="mini", seed=0, weights=None, probes=probes or None, dtype="float32", device="cpu", cache=cache
    )


def session(plan: AuditPlan, text: str, out: Path) -> Session:
    return Session(plan=side_plan(plan, parse_backend(text), install=True, progress=SILENT), log=out / "worker.log")


def captured(plan: AuditPlan, text: str, out: Path) -> Capture:
    one = session(plan, text, out)
    try:
        return take_capture(one, plan.probes, out, with_weights=True)
    finally:
        one.release()


@pytest.fixture(scope="module", params=MODELS)
def both(request, cache, tmp_path_factory) -> tuple[AuditPlan, Capture, Capture]:
    plan = planned(request.param, cache, *PROBES[request.param])
    out = tmp_path_factory.mktemp("vllm")
    return plan, captured(plan, "vllm", out / "vllm"), captured(plan, "hf", out / "hf")


def test_packed_weights_read_back_to_the_bit(both):
    _, vllm, hf = both
    digests = [{item.name: item.sha256 for item in capture.manifest.weights} for capture in (vllm, hf)]

    assert digests[0] == digests[1]
    assert len(digests[0]) > 30


def test_packed_experts_read_back_to_the_bit(cache, tmp_path):
    plan = planned("mixtral-8x7b", cache, "short")
    captures = (captured(plan, name, tmp_path / name) for name in ("vllm", "hf"))
    vllm, hf = ({item.name: item.sha256 for item in capture.manifest.weights} for capture in captures)

    assert vllm == hf
    assert sum("experts" in name for name in vllm) == 3 * 8 * 3


def test_every_site_but_the_paged_ones_agrees_on_every_probe(both):
    plan, vllm, hf = both
    for probe in plan.probes:
        shown = {site for site in hf.sites(probe.name) if not site.endswith(("attn_scores", "pattern"))}
        assert set(vllm.sites(probe.name)) == shown
        real = torch.tensor(probe.mask, dtype=torch.bool)
        for site in shown:
            a, b = (capture.tensor(probe.name, site)[real] for capture in (vllm, hf))
            assert (a - b).abs().max() <= (LOGITS_AGREE if site == "logits" else SITES_AGREE), (probe.name, site)


def test_what_is_paged_is_said_to_be_hidden(both):
    hidden = {item.site.rpartition(".")[2]: item.why for item in both[1].manifest.not_visible}

    assert hidden.keys() == {"attn_scores", "pattern"}
    assert "paged" in hidden["pattern"]


def test_it_says_what_runs(both):
    about = both[1].manifest.description

    assert about.settings["attention_backend"] == "CPU_ATTN"
    assert about.settings["compilation"] == "NONE"
    assert about.max_positions == max(probe.shape[1] for probe in both[0].probes)
    assert about.effective["attention.scale"] == [about.effective["attention.scale"][0]] * 4
    assert about.numerics["tf32"] is False
    assert about.tokenization == both[2].manifest.description.tokenization != {}
    assert about.parameters == sum(torch.Size(item.shape).numel() for item in both[1].manifest.weights) - tied(both[2])


def tied(capture: Capture) -> int:
    """The unembedding is listed and shares its parameter with the embedding."""
    return next(torch.Size(item.shape).numel() for item in capture.manifest.weights if item.name == "lm_head.weight")


def test_steps_and_cached_prefixes_change_nothing_but_rounding(cache, tmp_path):
    plan = planned(MODELS[0], cache, "ragged", "long")
    plain, cut = (captured(plan, text, tmp_path / text[:8].strip(",") / str(number)) for number, text in enumerate(
        ("vllm", "vllm,max_num_batched_tokens=64,enable_prefix_caching=true")
    ))  # fmt: skip

    assert cut.manifest.description.settings["max_num_batched_tokens"] == 64
    for probe in plan.probes:
        assert (plain.tensor(probe.name, "logits") - cut.tensor(probe.name, "logits")).abs().max() <= LOGITS_AGREE


def test_a_load_edit_takes_effect_and_can_be_taken_back(cache, tmp_path):
    plan = planned(MODELS[0], cache, "short")
    one = session(plan, "vllm", tmp_path)
    try:
        shipped = take_capture(one, plan.probes, tmp_path / "a").tensor("short", "logits")
        overrides = {"attn_logit_softcapping": 30, "query_pre_attn_scalar": 144.0}
        one.apply((Edit(op="load", value={"hf_overrides": overrides}),))
        live = one.description().effective
        edited = take_capture(one, plan.probes, tmp_path / "b").tensor("short", "logits")
        one.restore()
        loaded, restored = one.is_loaded, one.description().effective
        back = take_capture(one, plan.probes, tmp_path / "c").tensor("short", "logits")
    finally:
        one.release()

    assert (live["attention.softcap"], live["attention.scale"]) == ([30.0] * 4, [1 / 12] * 4)
    assert not loaded
    assert (restored["attention.softcap"], restored["attention.scale"]) == ([50.0] * 4, [1 / 16] * 4)
    assert (edited - shipped).abs().max() > 1e-3
    assert torch.equal(back, shipped)


def test_a_live_edit_takes_effect_and_can_be_taken_back(cache, tmp_path):
    plan = planned(MODELS[1], cache, "short")
    one = session(plan, "vllm", tmp_path)
    edit = Edit(op="set", path="model.layers[*].self_attn.attn.impl.scale", value=1 / 9)
    try:
        shipped = take_capture(one, plan.probes, tmp_path / "a").tensor("short", "logits")
        done = one.apply((edit,))
        edited = take_capture(one, plan.probes, tmp_path / "b").tensor("short", "logits")
        one.apply(())
        back = take_capture(one, plan.probes, tmp_path / "c").tensor("short", "logits")
    finally:
        one.release()

    assert [(item.before, item.after) for item in done] == [(1 / 8, 1 / 9)] * 4
    assert (edited - shipped).abs().max() > 1e-3
    assert torch.equal(back, shipped)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("enforce_eagr=false", "did you mean `enforce_eager`"),
        ("dtype=float31", "float31"),
    ],
)
def test_failures_inside_vllm_are_told(settings, message, cache, tmp_path):
    plan = planned(MODELS[0], cache, "short")
    with pytest.raises(BackendFailed, match=message):
        captured(plan, f"vllm,{settings}", tmp_path)


def test_an_engine_made_for_fewer_positions_runs_those_and_says_so(cache, tmp_path):
    """One of 20 positions is kept for the token that vLLM always draws."""
    taken = captured(planned(MODELS[0], cache, "short"), "vllm,max_model_len=20", tmp_path)

    assert taken.shape("short", "logits")[1] == 19
    assert any("position" in gap.what for gap in taken.manifest.not_tested)
