"""Compares the spec's formulas, run as a program on the miniature, with every backend: engines must compute what the spec says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parity_audit.api import audit
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef
from parity_audit.speccheck.check import PairCheck, able_backends, pair_check
from parity_audit.specs.as_program import SPEC
from parity_audit.specs.schema import Spec


def executed(
    spec: Spec, backends: Sequence[str] | None, *, out: Path, seed: int = 0, install: bool = True,
    progress: Progress = SILENT,
) -> list[PairCheck]:  # fmt: skip
    """Audit transformers and the backends with the spec as the reference, and return the result of each.

    Args:
        backends: BACKEND strings; None for every candidate that can run here.
        out: the folder of the report.

    Raises:
        ParityError: the spec does not run, so no backend can be compared.
    """
    model = spec.first_model
    able, _ = able_backends(spec, backends, install=install)
    asked = [BackendRef(name="hf"), *(ref for ref in able if ref.name not in ("hf", SPEC))]
    report = audit(
        model, candidates=asked, reference=SPEC, miniature="mini", seed=seed, repair=False, install=install, out=out,
        progress=progress,
    )  # fmt: skip
    return [pair_check(spec, model, ref, found) for ref, found in zip(asked, report.candidates, strict=True)]
