"""`batch_invariant=true` as a setting of a backend: in force in the worker, bitwise in the audit, refused by engines."""

from __future__ import annotations

import pytest

import parity_audit
from parity_audit.backends.invariant_mode import InvariantMode
from parity_audit.batch_invariant import context
from parity_audit.core.errors import BackendFailed
from parity_audit.core.invariance_report import Invariance
from parity_audit.core.types import Checkpoint, Description
from parity_audit.core.wire import LoadRequest


def asked(**settings: object) -> LoadRequest:
    checkpoint = Checkpoint(repo_id="a/b", path="/nowhere", fingerprint="0")
    return LoadRequest(checkpoint=checkpoint, dtype="float32", device="cpu", settings=settings)


def test_the_setting_is_taken_out_and_the_mode_is_in_force_until_the_next_load():
    mode = InvariantMode("hf")
    request = mode.taken_from(asked(batch_invariant=True, attn_implementation="sdpa"))
    assert request.settings == {"attn_implementation": "sdpa"}
    assert context.is_open()
    about = Description(backend="hf", package="transformers", version="5", settings=request.settings)
    assert mode.shown(about).settings["batch_invariant"] is True
    assert mode.taken_from(asked(batch_invariant=False)).settings == {}
    assert not context.is_open()


@pytest.mark.parametrize(
    ("backend", "value", "why"),
    [
        ("sglang", True, "does not reach"),
        ("hf", "yes", "neither true nor false"),
        ("vllm", "yes", "neither true nor false"),
    ],
)
def test_what_the_mode_does_not_reach_is_refused(backend, value, why):
    with pytest.raises(BackendFailed, match=why):
        InvariantMode(backend).taken_from(asked(batch_invariant=value))
    assert not context.is_open()


@pytest.mark.engine
def test_an_audit_with_the_setting_is_bitwise_where_the_plain_one_is_not(tmp_path):
    report = parity_audit.invariance(
        "meta-llama/Llama-3.2-1B", candidates=["hf", "hf,batch_invariant=true"], miniature="mini", quick=True, max_batch=5,
        completions=2, new_tokens=2, out=tmp_path,
    )  # fmt: skip
    plain, invariant = report.candidates
    axes = {axis.name: axis.verdict for axis in invariant.axes if axis.name != "padding"}

    assert plain.verdict is not Invariance.BITWISE
    assert plain.control.fired
    assert set(axes.values()) == {Invariance.BITWISE}, axes
    assert invariant.settings["batch_invariant"] is True


@pytest.mark.engine
def test_an_engine_whose_own_switch_replaces_no_kernel_here_is_an_error_that_says_so(tmp_path):
    report = parity_audit.invariance(
        "meta-llama/Llama-3.2-1B", candidates=["vllm,batch_invariant=true"], miniature="mini", quick=True, max_batch=2,
        completions=2, new_tokens=1, out=tmp_path,
    )  # fmt: skip

    assert report.candidates[0].verdict is Invariance.ERROR
    assert "does not support VLLM_BATCH_INVARIANT=1 on cpu" in report.candidates[0].why
    assert report.exit_code == 3
