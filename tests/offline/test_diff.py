"""`diff` believes a judge only when it is the reference's float64 run: everything else is refused by name."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from parity_audit.backends.sink import write_site
from parity_audit.capture.store import open_capture, write_manifest
from parity_audit.core.errors import CaptureBroken, UsageError
from parity_audit.core.manifest import Manifest
from parity_audit.core.report import Verdict
from parity_audit.core.types import Checkpoint, Probe, WeightPrint
from parity_audit.core.wire import RunRequest
from parity_audit.offline.diff import diff

PROBE = Probe(name="short", purpose="test", token_ids=((2, 9, 11),), mask=((1, 1, 1),))
OTHER = dataclasses.replace(PROBE, token_ids=((2, 9, 12),))
CHECKPOINT = Checkpoint(repo_id="org/model", path="/x", fingerprint="abc")
PRINT = WeightPrint(name="embed", shape=(2,), sha256="1", rms=1.0, sketch=(0.5,))


def write(folder, logits, dtype="float32"):
    entry = write_site(RunRequest(probe=PROBE, taps=(), out=str(folder)), "logits", logits, getattr(torch, dtype))
    manifest = Manifest(
        backend="mine", dtype=dtype, precision="float64" if dtype == "float64" else "native", device="cpu",
        checkpoint=CHECKPOINT, probes=(PROBE,), entries=(entry,),
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def truth():
    return torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def noise(truth):
    return 1e-4 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def two(tmp_path, truth, noise):
    """A reference, and a candidate that is a hundred times farther from the truth."""
    write(tmp_path / "a", truth + noise)
    write(tmp_path / "b", truth + 100 * noise)
    return tmp_path / "a", tmp_path / "b"


def add_judge(a, truth):
    return write(a / "judge", truth, "float64")


def rewrite(folder, **changes):
    write_manifest(folder, dataclasses.replace(open_capture(folder).manifest, **changes))


def test_a_fit_judge_measures_the_floor(two, truth):
    add_judge(two[0], truth)
    result = diff(*two).candidates[0]

    assert result.verdict is Verdict.MISMATCH
    assert result.logits.noise_ratio == pytest.approx(100, rel=1e-3)


def test_without_a_judge_nothing_is_claimed_and_the_next_step_is_named(two):
    report = diff(*two)

    assert report.candidates[0].verdict is Verdict.INCONCLUSIVE
    assert "--judge" in report.candidates[0].why
    assert report.exit_code == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "native"}, "not a true-float64 run"),
        ({"checkpoint": dataclasses.replace(CHECKPOINT, fingerprint="def")}, "reference's checkpoint"),
        ({"checkpoint": dataclasses.replace(CHECKPOINT, fingerprint="")}, "reference's checkpoint"),
        ({"probes": (OTHER,)}, "other tokens"),
        ({"probes": ()}, "did not run probe"),
        ({"entries": ()}, "did not run probe"),
    ],
)
def test_another_run_is_refused_as_judge(two, truth, changes, says):
    rewrite(add_judge(two[0], truth), **changes)

    with pytest.raises(UsageError, match=says) as caught:
        diff(*two)
    assert caught.value.code == "unfit-judge"
    assert "--judge" in caught.value.hint


def test_float32_numbers_in_float64_are_refused_as_judge(two, truth):
    add_judge(two[0], truth.float().double())

    with pytest.raises(UsageError, match="computed in float32"):
        diff(*two)


def test_float32_tensors_are_refused_as_judge(two, truth):
    judge = add_judge(two[0], truth)
    entry = write_site(RunRequest(probe=PROBE, taps=(), out=str(judge)), "logits", truth, torch.float32)
    rewrite(judge, entries=(entry,))

    with pytest.raises(UsageError, match="not float64"):
        diff(*two)


def test_the_candidate_and_the_reference_cannot_be_the_judge(two):
    with pytest.raises(UsageError, match="the judge is the candidate itself"):
        diff(*two, judge=two[1])
    with pytest.raises(UsageError, match="the judge is the reference itself"):
        diff(*two, judge=two[0])


def test_a_copy_of_the_candidate_cannot_be_the_judge(two):
    shutil.copytree(two[1], two[0] / "judge")

    with pytest.raises(UsageError, match="the judge is the candidate itself"):
        diff(*two)


def test_half_a_judge_is_an_error_and_not_a_missing_one(two):
    (two[0] / "judge").mkdir()

    with pytest.raises(CaptureBroken, match="judge is not a capture"):
        diff(*two)


def test_a_capture_is_not_compared_with_itself(two):
    with pytest.raises(UsageError, match="same capture"):
        diff(two[0], two[0])


def test_two_checkpoints_are_refused(two):
    rewrite(two[1], checkpoint=dataclasses.replace(CHECKPOINT, fingerprint="def"))

    with pytest.raises(UsageError, match="different checkpoints"):
        diff(*two)


def test_another_download_of_the_same_weights_is_the_same_checkpoint(two, truth):
    """Fingerprints hold the times of files; prints of the live tensors do not."""
    add_judge(two[0], truth)
    for folder in two:
        rewrite(folder, weights=(PRINT,))
    rewrite(two[1], checkpoint=dataclasses.replace(CHECKPOINT, fingerprint="def"))
    assert diff(*two).candidates[0].findings == ()

    rewrite(two[1], weights=(dataclasses.replace(PRINT, sha256="2", rms=2.0),))
    with pytest.raises(UsageError, match="tensor embed"):
        diff(*two)


def test_captures_that_do_not_name_their_checkpoint_say_so(two):
    rewrite(two[1], checkpoint=Checkpoint(repo_id="x", path="/x"))

    assert "weights" in [gap.what for gap in diff(*two).candidates[0].not_tested]


def test_the_report_names_architecture_and_spec(two):
    rewrite(two[0], architecture="Gemma2ForCausalLM", spec="gemma2.yaml")
    report = diff(*two)

    assert (report.model, report.architecture, report.spec) == ("org/model", "Gemma2ForCausalLM", "gemma2.yaml")
