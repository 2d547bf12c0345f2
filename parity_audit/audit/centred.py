"""A reference in the coordinates of a candidate whose weights are centred, so that causes can be sought there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parity_audit.audit.reference import Reference
from parity_audit.capture.centred import centred_copy
from parity_audit.capture.store import Capture


@contextmanager
def centred(reference: Reference, sites: frozenset[str], folder: Path) -> Iterator[Reference]:
    """The reference with the mean taken from these sites: of what was captured, and of what is captured until this ends.

    Args:
        sites: names without their blocks; none of them changes nothing.
        folder: where the captures without means go.
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
    def moved(capture: Capture | None, name: str) -> Capture | None:
        return None if capture is None else centred_copy(capture, sites, folder / name)

    plain = None if reference.plain is None else _moved(reference.plain, sites, folder / "plain")
    return dataclasses.replace(
        reference, capture=centred_copy(reference.capture, sites, folder / "reference"),
        judge=moved(reference.judge, "judge"), definition=moved(reference.definition, "definition"), plain=plain,
    )  # fmt: skip
