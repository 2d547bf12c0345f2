"""vLLM and transformers on two ranks: what the ranks show together is what one process shows, and faults of sharding are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from parity_audit.audit.before_diagnosis import sharded
from parity_audit.audit.reference import Reference
from parity_audit.capture.plan import plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.checks.sharding import sharding_findings
from parity_audit.compare.deltas import compare
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import BackendFailed
from parity_audit.core.progress import SILENT
from parity_audit.core.types import Edit
from parity_audit.specs.view import taps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
CORPUS = YAML(typ="safe").load(Path(__file__).with_name("sharding.yaml"))
LLAMA = "meta-llama/Llama-3.2-1B"
DIGITS = 1e-3
"""Of a constant that is read off one rank."""
SITES_AGREE = 1e-4
"""Relative RMSE in float32: sums over ranks are made in another order."""


class Sides:
    """A model on two ranks and in transformers, asked with one short probe."""

    def __init__(self, model: str, cache: Path, out: Path) -> None:
        self.plan = plan_audit(
            model, synthetic="mini", seed=0, weights=None, probes=["short"], dtype="float32", device="cpu", cache=cache
        )
        self.out, self.number = out, 0
        self.session, hf = (self._session(text) for text in ("vllm,tensor_parallel_size=2", "hf"))
        taken = take_capture(hf, self.plan.probes, out / "hf", with_weights=True)
        self.reference = Reference(
            session=hf, judging=hf, capture=taken, judge=None, probes=self.plan.probes, dtype="float32"
        )
        hf.release()

    def _session(self, text: str) -> Session:
        return Session(
            plan=side_plan(self.plan, parse_backend(text), install=True, progress=SILENT), log=self.out / f"{text}.log"
        )

    def taken(self, edits=()) -> Capture:
        self.number += 1
        self.session.apply(tuple(Edit(**edit) for edit in edits))
        return take_capture(self.session, self.plan.probes, self.out / f"run-{self.number}", with_weights=True)

    def findings(self, capture: Capture):
        return sharding_findings(sharded(self.session, capture, self.reference))


@pytest.fixture(scope="module")
def llama(cache, tmp_path_factory):
    sides = Sides(LLAMA, cache, tmp_path_factory.mktemp("sharded"))
    yield sides
    sides.session.release()


def test_ranks_show_together_what_one_process_shows(llama):
    capture, plan = llama.taken(), llama.session.plan
    digests = [{item.name: item.sha256 for item in one.manifest.weights} for one in (capture, llama.reference.capture)]
    shown = {tap.site for tap in taps(plan.spec, "vllm", plan.config, llama.session.description().version)}
    held = {share.site: share for share in capture.manifest.shares}

    assert digests[0] == digests[1]
    assert capture.sites("short") == shown | {"returned"}
    assert all(
        delta.rel < SITES_AGREE for delta in compare(capture, llama.reference.capture, None, dtype="float32").sites
    )
    assert held["blocks.0.q"].spans == ((0, 0, 2), (1, 2, 4))
    assert held["blocks.0.resid_mid"].how == "whole"
    assert not any(share.differs for share in capture.manifest.shares)
    assert llama.session.description().effective["n_kv_heads"] == [2] * 4
    assert llama.findings(capture) == []


def _as_named(sides: Sides, fault) -> None:
    found = sides.findings(sides.taken(fault["edits"]))

    assert [finding.knob for finding in found] == [fault["knob"]]
    assert found[0].evidence["ranks"] == fault.get("ranks", [])
    assert found[0].layers == (tuple(fault["layers"]) if "layers" in fault else None)
    wanted = fault.get("value", found[0].candidate_value)
    assert found[0].candidate_value == (pytest.approx(wanted, rel=DIGITS) if isinstance(wanted, float) else wanted)
    assert all(f"rank {rank}" in found[0].message for rank in fault.get("ranks", []))


@pytest.mark.parametrize("fault", [item for item in CORPUS if "model" not in item], ids=lambda fault: fault["name"])
def test_a_fault_of_sharding_is_named(llama, fault):
    _as_named(llama, fault)


@pytest.mark.parametrize("fault", [item for item in CORPUS if "model" in item], ids=lambda fault: fault["name"])
def test_a_fault_of_another_model_is_named(fault, cache, tmp_path):
    sides = Sides(fault["model"], cache, tmp_path)
    try:
        assert sides.findings(sides.taken()) == []
        _as_named(sides, fault)
    finally:
        sides.session.release()


def test_transformers_on_two_ranks_shows_what_one_process_shows(llama):
    session = llama._session("hf,tp=2")
    try:
        capture = take_capture(session, llama.plan.probes, llama.out / "hf-ranks", with_weights=True)
    finally:
        session.release()
    digests = [{item.name: item.sha256 for item in one.manifest.weights} for one in (capture, llama.reference.capture)]
    spans = {share.site: share.spans for share in capture.manifest.shares}

    assert digests[0] == digests[1]
    assert capture.sites("short") == llama.reference.capture.sites("short")
    assert all(
        delta.rel < SITES_AGREE for delta in compare(capture, llama.reference.capture, None, dtype="float32").sites
    )
    assert spans["blocks.0.attn_scores"] == ((0, 0, 2), (1, 2, 4))
    assert spans["blocks.0.resid_mid"] == ()
    assert not any(share.differs for share in capture.manifest.shares)


def test_experts_over_ranks_of_the_cpu_engine_are_refused_before_a_rank_dies_of_them(cache, tmp_path):
    plan = plan_audit(
        "mixtral-8x7b",
        synthetic="mini",
        seed=0,
        weights=None,
        probes=["short"],
        dtype="float32",
        device="cpu",
        cache=cache,
    )
    ref = parse_backend("vllm,tensor_parallel_size=2,enable_expert_parallel=true")
    session = Session(plan=side_plan(plan, ref, install=True, progress=SILENT), log=tmp_path / "log")
    with pytest.raises(BackendFailed, match="its kernel cpu_fused_moe takes no map"):
        session.description()
