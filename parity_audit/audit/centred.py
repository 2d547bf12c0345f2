"""A reference in the coordinates of a candidate whose weights are centred, so that causes can be sought there."""

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
    """The reference with the mean taken from these sites: of what was captured, and of what is captured until this ends.

    Args:
        sites: names without their blocks; none of them changes nothing.
        folder: where the captures without means go.

    Raises:
        NotJudged: the bound on scratch space leaves no room for them.
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
