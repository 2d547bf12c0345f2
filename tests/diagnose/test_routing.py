"""Two experts whose scores tie: another choice is as right, and where they do not it is not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import parity_audit
from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Verdict
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

PORT = Path(__file__).parents[1] / "ports" / "other_experts.py"
MODEL = "Qwen/Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which the routers' rows of two times four experts are the same."""
    root = tmp_path_factory.mktemp("tied")
    folder = Path(miniature.make(resolve_model(MODEL), root=root).path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[8:12] = tensor[4:8]
    own = tmp_path_factory.mktemp("weights")
    for other in folder.iterdir():
        if other.is_file() and other != file:
            (own / other.name).write_bytes(other.read_bytes())
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    return own


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_another_choice_is_parity_where_scores_tie_and_a_mismatch_where_they_do_not(tied, tmp_path):
    ports = [f"python:{PORT}:load", f"python:{PORT}:load,fault=true"]
    report = parity_audit.audit(
        MODEL, candidates=ports, weights=tied, probes=["short", "batch"], repair=False, out=tmp_path
    )
    other, wrong = report.candidates

    assert (other.verdict, other.findings) == (Verdict.PARITY, ())
    assert any("other experts" in warning and "probe short" in warning for warning in other.warnings)
    assert wrong.verdict is Verdict.MISMATCH
    assert [(item.knob, item.layers) for item in wrong.findings] == [("moe.choice", (1,))]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_constant_is_named_and_mended_beside_other_choices(tied, tmp_path):
    report = parity_audit.audit(
        MODEL, candidates=[f"python:{PORT}:load,eps=1e-3"], weights=tied, probes=["short"], out=tmp_path
    )
    (port,) = report.candidates

    assert port.verdict is Verdict.MISMATCH
    assert {item.knob for item in port.findings} == {"norm.eps", "qk_norm.eps"}
    assert port.patched is not None
    assert port.patched.verdict is Verdict.PARITY


@pytest.mark.engine
def test_a_judge_that_cannot_follow_the_reference_still_judges_and_says_so(tied, tmp_path, monkeypatch):
    def no_room(*_args, **_kwargs):
        raise NotJudged("no room for one more run", code="disk")

    monkeypatch.setattr(importlib.import_module("parity_audit.audit.reference"), "follow", no_room)
    report = parity_audit.audit(
        MODEL, candidates=["hf,attn_implementation=sdpa"], weights=tied, probes=["short"], repair=False, out=tmp_path
    )

    assert report.exit_code == 0
    assert report.candidates[0].verdict is Verdict.PARITY
    assert report.reference is not None
    assert any("no room for one more run" in note for note in report.reference.self_check)
