"""The runs of a gate: one per question, model and dtype, with the line that asks for each backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import Asked, Question
from parity_audit.matrix.ask import runs
from parity_audit.matrix.cells import cells, expanded, read_matrix
from parity_audit.specs.load import read_yaml
from parity_audit.specs.places import entry_lines


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, which answers questions that differ only in their candidate.

    `places` has, for each BACKEND string, the file and the line that ask for it.
    """

    asked: tuple[Asked, ...]
    places: tuple[tuple[str, tuple[str, int]], ...] = ()

    @property
    def group(self) -> str:
        """The group of the run's cases: model, dtype, and the question unless it is an audit."""
        first = self.asked[0]
        question = [] if first.question is Question.AUDIT else [first.question.value]
        return " ".join((first.model, first.dtype, *question))


def cells_of(path: Path) -> list[Cell]:
    """Return the runs that a matrix file asks for (`parity_audit.matrix.cells.Matrix`).

    Raises:
        UsageError: there is no such file, or it has an unknown key, an unknown model, no model or no candidate.
        SpecError: the YAML is broken; the error has the line.
    """
    matrix = read_matrix(path)
    lines = entry_lines(read_yaml(path), "candidates")
    places = {str(parse_backend(one)): (str(path), lines[text]) for text in matrix.candidates for one in expanded(text)}
    return [Cell(asked=tuple(group), places=tuple(places.items())) for group in runs(cells(matrix))]
