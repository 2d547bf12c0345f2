"""A fine-tune in a directory, named by a relative path, with and without a tokenizer, in TransformerBridge and vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import parity_audit
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

pytestmark = pytest.mark.engine
WEIGHTS_ONLY = ("config.json", "model.safetensors")


@pytest.mark.parametrize("files", [None, WEIGHTS_ONLY], ids=["whole", "without a tokenizer"])
def test_a_directory_is_audited_where_it_lies(files, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama.path, "fine-tune")
    for path in (tmp_path / "fine-tune").iterdir():
        if files is not None and path.name not in files:
            path.unlink()
    report = parity_audit.audit(
        "./fine-tune", candidates=["transformer_lens", "vllm"], probes=["short", "left_padded", "decode"], repair=False,
        out="out", limits=False,
    )  # fmt: skip

    assert [(one.verdict.value, one.findings) for one in report.candidates] == [("parity", ()), ("parity", ())]


def test_a_clamp_of_a_config_that_an_engine_leaves_out_is_named(cache, tmp_path):
    """vLLM's OLMoE reads no `clip_qkv`; every released one has none, and this one has."""
    made = miniature.make(resolve_model("allenai/OLMoE-1B-7B-0924"), root=cache / "synthetic")
    config = Path(shutil.copytree(made.path, tmp_path / "clamped")) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "clip_qkv": 1.5}))
    report = parity_audit.audit(
        str(config.parent),
        candidates=["transformer_lens", "vllm"],
        probes=["short"],
        repair=False,
        out=tmp_path / "out",
        limits=False,
    )
    bridge, engine = report.candidates

    assert bridge.verdict.value in ("exact", "parity")
    assert bridge.findings == ()
    assert engine.verdict.value == "mismatch"
    assert [(one.knob, one.reference_value, one.candidate_value) for one in engine.findings] == [
        ("attention.clip_qkv", 1.5, None)
    ]
