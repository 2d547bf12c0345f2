"""Real audits on a cache that is not as it was left: ports that write to their checkpoint, captures that are damaged, folders
that are named like the model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

pytestmark = pytest.mark.engine

PORTS = """
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file


def load(model_path, dtype, device):
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))


def spoil(model_path, dtype, device):
    model, file = load(model_path, dtype, device), Path(model_path) / "model.safetensors"
    save_file({name: 1.5 * value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return model
"""


def test_what_is_spoiled_shadowed_or_damaged_changes_no_verdict(tmp_path, monkeypatch, caplog):
    """One audit with a port that spoils its checkpoint, then the same again on a damaged capture of the reference."""
    monkeypatch.setenv("PARITY_AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    other = miniature.make(resolve_model("gpt2"), seed=7, root=tmp_path / "other")
    shutil.copytree(other.path, tmp_path / "gpt2")
    monkeypatch.setenv("HF_HUB_CACHE", str(Path(str(other.hf_home)) / "hub"))
    (tmp_path / "ports.py").write_text(PORTS)

    first = audit(tmp_path / "first")
    assert judged(first) == [Verdict.ERROR, Verdict.PARITY]
    assert "spoil changed the checkpoint that it was given: model.safetensors was altered" in first.candidates[0].why

    kept = sorted((tmp_path / "cache" / "captures").glob("*/short/logits.safetensors"))
    assert len(kept) >= 3
    for file in kept:
        data = bytearray(file.read_bytes())
        data[-3] ^= 64
        file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "parity_audit"):
        second = audit(tmp_path / "second")

    assert judged(second) == judged(first)
    assert second.candidates[1].logits == first.candidates[1].logits
    assert caplog.text.count("short/logits.safetensors is truncated or was altered") >= 3
    assert not list((tmp_path / "cache" / "working").glob("audit-*"))


def audit(out):
    ports = [f"python:ports.py:{name}" for name in ("spoil", "load")]
    return parity_audit.audit(
        "gpt2", candidates=ports, miniature="mini", probes=["short"], out=out, repair=False, limits=False
    )


def judged(report):
    return [candidate.verdict for candidate in report.candidates]
