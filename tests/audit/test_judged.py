"""What is kept of a judged candidate: its result and its manifest, for the same question and the same program alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from report.sample import WRONG

from parity_audit.audit.judged import keep_result, kept_result
from parity_audit.backends.sink import write_site
from parity_audit.capture.store import RESULTS_ONLY, Capture, open_capture, write_manifest
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import RunRequest

PROBE = Probe(name="short", purpose="test", token_ids=((2, 9, 11),), mask=((1, 1, 1),))


@pytest.fixture
def taken(tmp_path: Path) -> Capture:
    folder = tmp_path / "abc"
    request = RunRequest(probe=PROBE, taps=(), out=str(folder))
    entry = write_site(request, "logits", torch.ones(1, 3, 5), torch.float32)
    checkpoint = Checkpoint(repo_id="x", path="/x")
    write_manifest(
        folder, Manifest(backend="m", dtype="float32", device="cpu", checkpoint=checkpoint, entries=(entry,))
    )
    return open_capture(folder)


def test_a_result_comes_back_as_it_was_and_the_tensors_are_gone(taken: Capture):
    keep_result(WRONG, taken, "question")

    found = kept_result(taken.folder, "question")
    assert found is not None
    assert found[0] == WRONG
    assert found[1].manifest == taken.manifest
    assert sorted(path.name for path in taken.folder.iterdir()) == [RESULTS_ONLY, "manifest.json", "manifest.sha256"]


def test_a_capture_without_a_result_is_left_alone(taken: Capture):
    assert kept_result(taken.folder, "question") is None
    assert kept_result(taken.folder.parent / "nothing", "question") is None
    taken.verify()


@pytest.mark.parametrize(
    "damage", [None, "{", '{"question": "question"}', '{"question": "question", "result": {}}', "[]"]
)
def test_another_question_or_a_damaged_result_is_no_answer(taken: Capture, damage: str | None):
    keep_result(WRONG, taken, "another" if damage is None else "question")
    if damage is not None:
        (taken.folder / RESULTS_ONLY).write_text(damage)

    assert kept_result(taken.folder, "question") is None
