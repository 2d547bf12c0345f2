"""Bring a reference into the coordinates of a candidate with centred weights, so that such a candidate can be diagnosed.

A candidate whose weights were centred (TransformerLens's center_writing_weights and center_unembed) computes activations
without their mean over the last axis. They can be compared only with a reference whose mean was subtracted at the same sites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parity_audit.audit.reference import Reference
from parity_audit.capture.centred import bytes_of_copy, centred_copy
from parity_audit.capture.store import Capture


@contextmanager
def centred(reference: Reference, sites: frozenset[str], folder: Path) -> Iterator[Reference]:
    """Yield the reference with the mean over the last axis subtracted at these sites.

    The mean is subtracted from the captures that exist, and from every capture that is taken while the context is open.

    Args:
        sites: site names without their block; an empty set changes nothing.
        folder: where the captures without means are written.

    Raises:
        NotJudged: the bound on scratch space leaves no room for these captures.
    """
    sessions = (reference.session, reference.judging)
    for session in sessions:
        session.plan = dataclasses.replace(session.plan, centred=sites)
    try:
        yield _moved(reference, sites, folder) if sites else reference
    finally:
        for session in sessions:
            session.plan = dataclasses.replace(session.plan, centred=frozenset())


def _moved(reference: Reference, sites: frozenset[str], folder: Path) -> Reference:
    scratch = reference.session.scratch

    def moved(capture: Capture, name: str) -> Capture:
        if scratch is not None:
            scratch.require(bytes_of_copy(capture, sites), f"a copy of the {name} run of the reference without means")
        return centred_copy(capture, sites, folder / name)

    def if_there(capture: Capture | None, name: str) -> Capture | None:
        return None if capture is None else moved(capture, name)

    plain = None if reference.plain is None else _moved(reference.plain, sites, folder / "plain")
    return dataclasses.replace(
        reference, capture=moved(reference.capture, "own"), judge=if_there(reference.judge, "judge"),
        definition=if_there(reference.definition, "definition"), plain=plain,
    )  # fmt: skip
