"""A long probe of which some positions are kept: logits are computed for those alone, and are those of a whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from parity_audit.capture.probes import padded
from parity_audit.core.sites import LOGITS
from parity_audit.core.types import SiteTap
from parity_audit.core.wire import FLOAT64, NATIVE, RunRequest

KEPT = (0, 1, 7, 30, 63)
TAPS = (SiteTap(site="ln_final.out", module="model.norm"), SiteTap(site=LOGITS, module="", take="output"))


@pytest.fixture(scope="module")
def backend(loaded, gemma):
    return loaded(gemma)


@pytest.mark.parametrize("precision", [NATIVE, FLOAT64])
def test_logits_of_the_kept_positions_are_those_of_a_whole_run(backend, tmp_path, precision):
    probe = padded("long", "", [list(range(8, 72))], sites="residual")
    runs = {}
    widths = []
    for name, one in (("whole", probe), ("kept", replace(probe, kept=KEPT))):
        hook = backend.model.lm_head.register_forward_hook(lambda *call: widths.append(call[2].shape[1]))
        reply = backend.run(
            RunRequest(probe=one, taps=TAPS, out=str(tmp_path / name), precision=precision, returned=True),
            lambda *_: None,
        )
        hook.remove()
        runs[name] = {entry.site: load_file(tmp_path / name / entry.file)["x"] for entry in reply.entries}

    assert widths == [64, len(KEPT)]
    assert runs["kept"].keys() == runs["whole"].keys() >= {"ln_final.out", "returned"}
    for site, values in runs["kept"].items():
        assert values.shape[1] == len(KEPT)
        torch.testing.assert_close(values, runs["whole"][site][:, list(KEPT)], rtol=1e-5, atol=1e-6)
