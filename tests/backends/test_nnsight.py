"""nnsight's real tracing against transformers on the same miniatures: values to the bit, edits inside a trace as in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import parity_audit
from parity_audit.capture.plan import AuditPlan, plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import EnvFailed
from parity_audit.core.progress import SILENT
from parity_audit.core.report import Verdict
from parity_audit.core.types import SiteTap
from parity_audit.core.wire import RunRequest
from parity_audit.envs.build import python_for
from parity_audit.specs.view import taps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LLAMA = "meta-llama/Llama-3.2-1B"
MODELS = ("gpt2", LLAMA, "gemma-2-2b-it")
PROBES = ("short", "left_padded", "decode")


@pytest.fixture(scope="module", autouse=True)
def _environment(cache):
    try:
        python_for(parse_backend("nnsight"))
    except EnvFailed as error:
        pytest.skip(f"NNSIGHT WAS NOT TESTED: its environment cannot be made here: {error.message}")


class Side:
    """One program with the model loaded."""

    def __init__(self, plan: AuditPlan, text: str, out: Path) -> None:
        self.plan, self.out = plan, out
        backend = side_plan(plan, parse_backend(text), install=True, progress=SILENT)
        self.session = Session(plan=backend, log=out / "worker.log", decodes=True)
        self.capture: Capture = take_capture(self.session, plan.probes, out, with_weights=True)

    def run(self, *sites: str, extra: tuple[SiteTap, ...] = (), **given: torch.Tensor):
        """The reply to a run of the probe `short`, with some sites replaced, and the logits of it."""
        inputs = {}
        for site, value in given.items():
            inputs[site] = str(self.out / "given.safetensors")
            save_file({"x": value}, inputs[site])
        plan = self.session.plan
        known = taps(plan.spec, plan.backend_key, plan.config, self.session.description().version)
        shown = [tap for tap in known if tap.site in ("logits", *sites, *given)]
        probe = next(probe for probe in self.plan.probes if probe.name == "short")
        out = self.out / "again"
        reply = self.session.replay(RunRequest(probe=probe, taps=(*shown, *extra), out=str(out), inputs=inputs))
        return reply, load_file(out / next(entry.file for entry in reply.entries if entry.site == "logits"))["x"]


def sides(model: str, out: Path, *texts: str) -> list[Side]:
    plan = plan_audit(
        model, synthetic="mini", seed=0, weights=None, probes=PROBES, dtype="float32", device="cpu", cache=out / "cache",
    )  # fmt: skip
    return [Side(plan, text, out / str(number)) for number, text in enumerate(texts)]


@pytest.mark.parametrize("model", MODELS)
def test_every_site_and_every_edit_is_that_of_transformers(model, tmp_path):
    """The same kernels on the same numbers: no bit may differ, in whole, padded and decoded runs, and when steered."""
    hf, traced = sides(model, tmp_path, "hf", "nnsight")
    try:
        assert traced.capture.manifest.not_visible == hf.capture.manifest.not_visible
        for probe in PROBES:
            assert traced.capture.sites(probe) == hf.capture.sites(probe)
            assert {"blocks.1.rot_k", "blocks.2.resid_mid", "logits"} <= traced.capture.sites(probe)
            for site in hf.capture.sites(probe):
                assert torch.equal(traced.capture.tensor(probe, site), hf.capture.tensor(probe, site)), (probe, site)
        assert {"blocks.1.pattern", "blocks.1.attn_scores"} <= traced.capture.sites("short")
        for site in ("blocks.1.resid_post", "blocks.1.pattern", "blocks.1.attn_scores", "blocks.1.rot_q", "blocks.1.z"):
            value = hf.capture.tensor("short", site).float()
            moved = (
                value * 1.5 if site.endswith(("pattern", "scores")) else value + torch.linspace(-1, 1, value.shape[-1])
            )
            (_, mine), (_, theirs) = traced.run(**{site: moved}), hf.run(**{site: moved})
            still = hf.capture.tensor("short", "logits")
            assert (mine - still).abs().max() > 1e-3, site
            assert torch.equal(mine, theirs), site
    finally:
        for side in (hf, traced):
            side.session.release()


def test_what_a_trace_cannot_show_is_said(tmp_path):
    (side,) = sides(LLAMA, tmp_path, "nnsight,attn_implementation=sdpa")
    try:
        tap = next(tap for tap in _taps(side) if tap.site == "blocks.0.attn_out")
        absent, silent = replace(tap, site="a", module="model.nothing"), replace(tap, site="b", module="model.layers")
        reply, _ = side.run("blocks.0.pattern", "blocks.0.rot_q", extra=(absent, silent))
    finally:
        side.session.release()

    assert {item.site: item.why for item in reply.not_visible} == {
        "a": "no module `model.nothing` here",
        "b": "the trace never reached it",
        "blocks.0.pattern": "the attention kernel does not show it",
    }
    assert "blocks.0.rot_q" in {entry.site for entry in reply.entries}


def _taps(side: Side) -> tuple[SiteTap, ...]:
    plan = side.session.plan
    return taps(plan.spec, plan.backend_key, plan.config, "")


def test_a_wrong_constant_is_named_and_patched_in_the_module_inside(tmp_path):
    report = parity_audit.audit(
        LLAMA, candidates=["nnsight,rms_norm_eps=0.01"], miniature="mini", probes=["short"], out=tmp_path / "out"
    )
    (candidate,) = report.candidates

    assert candidate.verdict is Verdict.MISMATCH
    assert [one.knob for one in candidate.findings] == ["norm.eps"]
    assert candidate.findings[0].candidate_value == pytest.approx(0.01, rel=1e-2)
    assert "model = traced._module" in candidate.patches[0].code
    assert candidate.patched is not None
    assert candidate.patched.verdict in (Verdict.EXACT, Verdict.PARITY)


def test_a_release_with_another_model_class_and_other_sources_is_at_parity(tmp_path):
    """0.5 wraps a LanguageModel, loses keywords that it does not know, and lists the operations of a source elsewhere."""
    probes = ["short", "left_padded", "decode", "decode_batch"]
    report = parity_audit.audit(
        "gpt2",
        candidates=["nnsight==0.5.15"],
        miniature="mini",
        probes=probes,
        out=tmp_path,
        limits=False,
        repair=False,
    )
    (candidate,) = report.candidates

    assert candidate.verdict in (Verdict.EXACT, Verdict.PARITY)
    assert candidate.findings == ()
    assert {"blocks.0.q", "blocks.0.attn_scores", "blocks.0.pattern"} <= {one.site for one in candidate.sites}
