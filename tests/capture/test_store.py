"""Captures on disk: what is broken is named, never read."""

import dataclasses
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from parity_audit.backends.sink import write_site
from parity_audit.capture.store import open_capture, write_manifest
from parity_audit.compare.deltas import compare
from parity_audit.core.errors import CaptureBroken
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import RunRequest

PROBE = Probe(name="short", purpose="test", token_ids=((2, 9, 11),), mask=((1, 1, 1),))


def make(folder, logits, dtype=torch.float32, probe=PROBE):
    request = RunRequest(probe=probe, taps=(), out=str(folder))
    entry = write_site(request, "logits", logits, dtype)
    manifest = Manifest(
        backend="mine", dtype="float32", device="cpu", checkpoint=Checkpoint(repo_id="x", path="/x"), probes=(probe,),
        entries=(entry,),
    )  # fmt: skip
    write_manifest(folder, manifest)
    return open_capture(folder)


@pytest.fixture
def logits():
    return torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_scores_that_a_softmax_ignores_are_masked_however_a_program_writes_them(tmp_path, low):
    scores = torch.tensor([[[[3.0, low, low], [1.0, -90.0, low], [2.0, -3000.0, 5.0]]]])
    entry = write_site(
        RunRequest(probe=PROBE, taps=(), out=str(tmp_path)), "blocks.0.attn_scores", scores, torch.float32
    )
    written = load_file(tmp_path / entry.file)["x"]

    assert torch.equal(written.isneginf(), scores == low)
    assert entry.non_finite == 0


def test_round_trip(tmp_path, logits):
    taken = make(tmp_path, logits)

    assert torch.equal(taken.tensor("short", "logits"), logits.float())
    assert torch.equal(taken.rows("short", "logits", 1, 3), logits.float()[:, 1:3])


def test_a_truncated_file_is_broken(tmp_path, logits):
    taken = make(tmp_path, logits)
    path = taken.file("short", "logits")
    path.write_bytes(path.read_bytes()[:-4])

    with pytest.raises(CaptureBroken, match="truncated or was altered"):
        taken.tensor("short", "logits")


def test_a_missing_file_is_broken(tmp_path, logits):
    taken = make(tmp_path, logits)
    taken.file("short", "logits").unlink()

    with pytest.raises(CaptureBroken, match="missing"):
        taken.tensor("short", "logits")


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', '{"format": 1}', '{"format": 1, "nonsense": 2}'])
def test_a_broken_manifest_is_broken(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CaptureBroken):
        open_capture(tmp_path)


def test_a_manifest_cannot_point_outside(tmp_path, logits):
    taken = make(tmp_path / "a", logits)
    entry = dataclasses.replace(taken.manifest.entries[0], file="../secret.safetensors")
    write_manifest(tmp_path / "a", dataclasses.replace(taken.manifest, entries=(entry,)))

    with pytest.raises(CaptureBroken, match="outside"):
        open_capture(tmp_path / "a").tensor("short", "logits")


def test_json_has_no_nan(tmp_path, logits):
    logits[0, 1, 7] = float("nan")
    taken = make(tmp_path, logits)

    assert taken.manifest.entries[0].non_finite == 1
    assert "NaN" not in json.dumps(json.loads((tmp_path / "manifest.json").read_text()))


def test_distance_of_captures_against_the_judge(tmp_path, logits):
    """A candidate whose error is five times the reference's has noise ratio 5."""
    noise = 1e-3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    judge = make(tmp_path / "judge", logits, torch.float64)
    reference = make(tmp_path / "reference", logits + noise, torch.float64)
    candidate = make(tmp_path / "candidate", logits + 5 * noise, torch.float64)

    found = compare(candidate, reference, judge, dtype="float32")

    assert found.logits is not None
    assert found.logits.noise_ratio == pytest.approx(5.0)
    assert found.logits.max_abs == pytest.approx(4 * noise.abs().max().item())


def test_a_clipped_candidate_is_compared_as_a_prefix(tmp_path, logits):
    reference = make(tmp_path / "reference", logits)
    candidate = make(tmp_path / "candidate", logits[:, :2], probe=PROBE.columns(0, 2))

    found = compare(candidate, reference, None, dtype="float32")

    assert found.logits is not None
    assert found.logits.max_abs == 0.0


DAMAGE = {
    "tensor": lambda folder: flip(folder / "short" / "logits.safetensors"),
    "truncated": lambda folder: os.truncate(folder / "short" / "logits.safetensors", 40),
    "deleted": lambda folder: (folder / "short" / "logits.safetensors").unlink(),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "number in the manifest": lambda folder: rewrite(folder / "manifest.json", '"cpu"', '"gpu"'),
    "half": lambda folder: (folder / "manifest.json").unlink(),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def rewrite(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_found_before_a_capture_is_used_again(tmp_path, logits, damage):
    make(tmp_path / "kept", logits)
    open_capture(tmp_path / "kept").verify()
    DAMAGE[damage](tmp_path / "kept")

    with pytest.raises(CaptureBroken):
        open_capture(tmp_path / "kept").verify()
