"""A fine-tune in a directory, named by a relative path, with and without a tokenizer, in TransformerBridge and vLLM."""

from __future__ import annotations

import shutil

import pytest

import parity_audit

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
        out="out",
    )  # fmt: skip

    assert [(one.verdict.value, one.findings) for one in report.candidates] == [("parity", ()), ("parity", ())]
