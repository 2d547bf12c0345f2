"""What a capture says that it does not hold."""

from __future__ import annotations

from parity_audit.capture.take import of_several_probes
from parity_audit.core.types import NotTested


def test_gaps_that_differ_in_the_probe_alone_are_one():
    gaps = [
        NotTested(what="cached decoding (probe decode)", why="no cache"),
        NotTested(what="a kernel", why="no cache"),
        NotTested(what="cached decoding (probe decode_batch)", why="no cache"),
        NotTested(what="cached decoding (probe continued)", why="another reason"),
        NotTested(what="a kernel", why="no cache"),
    ]

    assert of_several_probes(gaps) == [
        NotTested(what="cached decoding (probes decode, decode_batch)", why="no cache"),
        NotTested(what="a kernel", why="no cache"),
        NotTested(what="cached decoding (probe continued)", why="another reason"),
    ]
