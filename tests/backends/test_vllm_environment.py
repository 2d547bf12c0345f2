"""The variables that vLLM reads when it is imported."""

import os

import pytest

from parity_audit.backends import vllm_engine
from parity_audit.core.wire import BATCH_INVARIANT


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(vllm_engine, "_imported_with", {})


def test_float32_is_float32_unless_tf32_is_asked_for():
    vllm_engine.set_environment({}, "cpu")
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == "highest"
    vllm_engine.set_environment({"max_num_seqs": 8}, "cpu")  # which is no variable


@pytest.mark.parametrize("settings", [{"tf32": True}, {BATCH_INVARIANT: True}, {"tensor_parallel_size": 2}])
def test_what_was_imported_with_other_variables_is_refused(settings):
    vllm_engine.set_environment({}, "cpu")
    with pytest.raises(RuntimeError, match=r"vLLM was imported with .* these settings need"):
        vllm_engine.set_environment(settings, "cpu")
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
