"""Which tensors of a candidate a replay can compare."""

from __future__ import annotations

import pytest

from parity_audit.capture.store import Capture
from parity_audit.core.manifest import Entry, Manifest
from parity_audit.core.types import Checkpoint
from parity_audit.diagnose.replay import Sides


def capture(folder, assumes="", **shapes):
    entries = tuple(
        Entry(
            probe="short", site=f"blocks.{name[-1]}.{name[:-1]}", file="", shape=shape, dtype="float32", sha256="", assumes=assumes
        )
        for name, shape in shapes.items()
    )  # fmt: skip
    checkpoint = Checkpoint(repo_id="x", path=str(folder))
    return Capture(folder, Manifest(backend="x", dtype="float32", device="cpu", checkpoint=checkpoint, entries=entries))


@pytest.mark.parametrize(
    ("assumes", "kept"),
    [
        ("attention is written so", {"blocks.0.rot_k", "blocks.1.rot_k"}),
        ("", {"blocks.0.rot_k", "blocks.1.rot_k", "blocks.0.q", "blocks.0.pattern"}),
    ],
)
def test_what_rests_on_an_assumption_needs_the_axes_of_the_reference(tmp_path, assumes, kept):
    """The reference shows rotated keys of one layer alone, other axes of the queries, and no pattern."""
    own = capture(tmp_path, assumes, rot_k0=(1, 3, 2, 8), rot_k1=(1, 3, 2, 8), q0=(1, 3, 4, 8), pattern0=(1, 4, 3, 3))
    reference = capture(tmp_path, rot_k0=(1, 3, 2, 8), q0=(1, 3, 2, 8))

    sides = Sides(candidate=own, reference=reference, definition=None).alike()

    assert sides.candidate.sites("short") == kept
