"""SGLang's real scheduler and model against transformers on the same miniature: weights to the bit, sites and edits to rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_audit.capture.plan import AuditPlan, plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import BackendFailed, EnvFailed
from parity_audit.core.progress import SILENT
from parity_audit.core.types import Edit
from parity_audit.core.wire import RunRequest
from parity_audit.specs.view import taps

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MODEL = "meta-llama/Llama-3.2-1B"
LOGITS_AGREE = 3e-5
SITES_AGREE = 1e-4
EDITED = "blocks.1.resid_post"
STEERED_AGREE = 1e-5


class Side:
    """One program with the model loaded, and what it shows of every probe."""

    def __init__(self, plan: AuditPlan, text: str, out: Path) -> None:
        self.plan, self.out = plan, out
        self.session = Session(
            plan=side_plan(plan, parse_backend(text), install=True, progress=SILENT),
            log=out / "worker.log",
            decodes=True,
        )
        self.capture: Capture = take_capture(self.session, plan.probes, out, with_weights=True)

    def steered(self, by: torch.Tensor) -> torch.Tensor:
        """Logits of the probe `short` with a vector added to the residual stream after block 1."""
        probe = next(probe for probe in self.plan.probes if probe.name == "short")
        given = self.out / "given.safetensors"
        save_file({"x": self.capture.tensor("short", EDITED).float() + by}, given)
        plan = self.session.plan
        version = self.session.description().version
        shown = [
            tap for tap in taps(plan.spec, plan.backend_key, plan.config, version) if tap.site in ("logits", EDITED)
        ]
        out = self.out / "steered"
        reply = self.session.replay(
            RunRequest(probe=probe, taps=tuple(shown), out=str(out), inputs={EDITED: str(given)})
        )
        return load_file(out / next(entry.file for entry in reply.entries if entry.site == "logits"))["x"]


@pytest.fixture(scope="module")
def sides(cache, tmp_path_factory):
    plan = plan_audit(
        MODEL, synthetic="mini", seed=0, weights=None, probes=("short", "ragged", "left_padded", "decode"), dtype="float32",
        device="cpu", cache=cache,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("sglang")
    try:
        engine = Side(plan, "sglang", out / "sglang")
    except EnvFailed as error:
        pytest.skip(f"SGLANG WAS NOT TESTED: its environment cannot be made here: {error.message}")
    reference = Side(plan, "hf", out / "hf")
    yield engine, reference
    for side in (engine, reference):
        side.session.release()


def test_its_weights_are_the_checkpoints_to_the_bit(sides):
    digests = [{item.name: item.sha256 for item in side.capture.manifest.weights} for side in sides]

    assert digests[0] == digests[1]
    assert len(digests[0]) > 30


def test_every_site_but_the_paged_ones_agrees_on_every_probe(sides):
    engine, reference = (side.capture for side in sides)
    for probe in sides[0].plan.probes:
        shown = {site for site in reference.sites(probe.name) if not site.endswith(("attn_scores", "pattern"))}
        assert set(engine.sites(probe.name)) == shown
        real = torch.tensor(probe.mask, dtype=torch.bool)
        for site in shown:
            a, b = (capture.tensor(probe.name, site)[real] for capture in (engine, reference))
            assert (a - b).abs().max() <= (LOGITS_AGREE if site == "logits" else SITES_AGREE), (probe.name, site)


def test_a_steering_vector_moves_the_logits_as_it_does_in_transformers(sides):
    torch.manual_seed(0)
    by = torch.randn(sides[0].capture.tensor("short", EDITED).shape[-1])
    engine, reference = (side.steered(by) for side in sides)
    plain = sides[1].capture.tensor("short", "logits")

    assert (reference - plain).abs().max() > 0.05
    assert (engine - reference).abs().max() <= STEERED_AGREE


def test_it_says_what_runs_and_what_is_paged(sides):
    about = sides[0].capture.manifest.description
    hidden = {item.site.rpartition(".")[2] for item in sides[0].capture.manifest.not_visible}

    assert hidden == {"attn_scores", "pattern"}
    assert about.settings["attention_backend"] == "torch_native"
    assert about.settings["disable_radix_cache"] is True
    assert about.effective["attention.scale"] == [0.125] * 4
    assert about.tokenization == sides[1].capture.manifest.description.tokenization != {}
    assert "CUDA kernels and CUDA graphs" in {gap.what for gap in about.not_run}


def test_a_live_edit_takes_effect_and_can_be_taken_back(sides):
    session, path = sides[0].session, "model.layers[*].self_attn.attn.scaling"
    plain = sides[0].steered(torch.zeros(1))
    session.apply((Edit(op="set", path=path, value=0.25),))
    edited = sides[0].steered(torch.zeros(1))
    session.apply(())

    assert (edited - plain).abs().max() > 1e-3
    assert torch.equal(sides[0].steered(torch.zeros(1)), plain)


def test_a_setting_that_it_does_not_have_is_named_with_the_nearest(sides, tmp_path):
    plan = sides[0].session.plan
    wrong = replace(plan, ref=parse_backend("sglang,atention_backend=torch_native"))
    one = Session(plan=wrong, log=tmp_path / "worker.log")
    try:
        with pytest.raises(BackendFailed, match="did you mean `attention_backend`"):
            one.description()
    finally:
        one.release()
