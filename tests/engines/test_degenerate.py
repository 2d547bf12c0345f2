"""Checkpoints on which every program agrees: nothing is claimed of them, whatever the candidate computes."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import parity_audit
from parity_audit.compare.signal import FLAT, IGNORES_CONTEXT
from parity_audit.core.report import Verdict
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LLAMA = "meta-llama/Llama-3.2-1B"


def checkpoint(folder, change):
    """The miniature with every tensor replaced by `change(name, tensor)`."""
    made = miniature.make(resolve_model(LLAMA), size="mini", seed=0, root=folder / "made")
    out = folder / "weights"
    shutil.copytree(made.path, out)
    for file in Path(out).glob("*.safetensors"):
        tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})
    return out


CASES = {
    "weights of zero": (lambda name, tensor: torch.zeros_like(tensor), FLAT),
    "attention that adds nothing": (lambda name, tensor: tensor * ("o_proj" not in name), IGNORES_CONTEXT),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reference_that_says_nothing_is_inconclusive(case, tmp_path):
    change, why = CASES[case]
    report = parity_audit.audit(
        LLAMA, candidates=["hf"], weights=checkpoint(tmp_path, change), out=tmp_path / "out",
        probes=["short", "repeated"], repair=False, limits=False,
    )  # fmt: skip

    assert (report.candidates[0].verdict, report.candidates[0].why) == (Verdict.INCONCLUSIVE, why)
    assert report.exit_code == 3
