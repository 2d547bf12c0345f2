"""What needs a GPU: the same audits on CUDA. Skips loudly where there is none."""

from __future__ import annotations

import pytest
import torch

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: GPU audits were NOT run"),
]


@pytest.mark.parametrize("model", ["gemma-2-2b-it", "meta-llama/Llama-3.2-1B"])
def test_clean_ports_on_the_gpu(model, tmp_path):
    report = parity_audit.audit(model, candidates=["transformer_lens"], miniature="mini", device="cuda", out=tmp_path)

    assert report.candidates[0].verdict in (Verdict.EXACT, Verdict.PARITY)
    assert report.candidates[0].findings == ()
