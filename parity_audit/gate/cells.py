"""The audits of a gate: one per model and dtype, with the line that asked for each backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.types import BackendRef
from parity_audit.matrix.cells import cells, expanded, read_matrix
from parity_audit.specs.load import read_yaml
from parity_audit.specs.places import entry_lines


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One audit: every backend of a model in one dtype. `lines`: where each backend is asked for, by its string.

    `synthetic`, `device`, `probes` and `repair` are as of `parity_audit.audit`; no probes are all of them.
    """

    model: str
    dtype: str
    reference: str
    backends: tuple[BackendRef, ...]
    synthetic: str | None = "mini"
    device: str = "cpu"
    probes: tuple[str, ...] = ()
    repair: bool = True
    file: str = ""
    lines: tuple[tuple[str, int], ...] = ()


def cells_of(path: Path) -> list[Cell]:
    """The audits that a matrix file asks for (`parity_audit.matrix.cells.Matrix`).

    Raises:
        UsageError: no such file, an unknown key, an unknown model, no model or no candidate.
        SpecError: broken YAML, with its line.
    """
    matrix = read_matrix(path)
    places = entry_lines(read_yaml(path), "candidates")
    lines = {str(parse_backend(one)): places[text] for text in matrix.candidates for one in expanded(text)}
    asked = itertools.groupby(cells(matrix), key=lambda one: (one.model, one.dtype))
    return [
        Cell(
            model=model, dtype=dtype, reference=matrix.reference,
            backends=tuple(parse_backend(one.candidate) for one in group), synthetic=matrix.synthetic,
            device=matrix.device, probes=matrix.probes, repair=matrix.repair, file=str(path), lines=tuple(lines.items()),
        )
        for (model, dtype), group in asked
    ]  # fmt: skip
