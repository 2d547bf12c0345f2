"""Build the cells of a matrix, models by candidates, from the command line or a YAML file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import Asked, Question
from parity_audit.core.choices import nearest, require_choice
from parity_audit.core.errors import UsageError
from parity_audit.core.version import __version__
from parity_audit.logprobs.question import ENGINES
from parity_audit.matrix.ask import QUICK
from parity_audit.matrix.fleet.resources import Rule, read_rules
from parity_audit.specs.load import list_specs, read_yaml
from parity_audit.specs.resolve import ResolvedModel, resolve_model

BRACES = re.compile(r"\{([^{}:\"]*,[^{}:\"]*)\}")
"""Matches a list in braces, such as versions. A JSON object as a setting has colons or quotes and does not match."""
EVERY_ARCHITECTURE = "all"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The request for a matrix: every question about every model with every candidate in every dtype.

    A question about log-probabilities applies only to candidates that are engines which sample. `probes` and `repair` apply
    to audits. `quick` uses small batches for invariance. `resources` are what cells need from the machines of a cluster.
    """

    models: tuple[str, ...]
    candidates: tuple[str, ...]
    reference: str = "hf"
    synthetic: str | None = None
    seed: int = 0
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"
    probes: tuple[str, ...] = ()
    repair: bool = True
    questions: tuple[str, ...] = (Question.AUDIT.value,)
    quick: bool = False
    resources: tuple[Rule, ...] = ()


def expanded(text: str) -> list[str]:
    """Expand braces like a shell: `transformer_lens=={2.18.0,4.3.0}` becomes one BACKEND string per version."""
    found = BRACES.search(text)
    if found is None:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    return [one for choice in found[1].split(",") for one in expanded(f"{before}{choice.strip()}{after}")]


def cells(matrix: Matrix) -> list[Asked]:
    """Return every cell, ordered by question, then model, then dtype; everything is checked before anything runs.

    Raises:
        UsageError: a question, model or BACKEND is malformed or unknown (the message names it), or there is no cell.
    """
    for name in matrix.questions:
        require_choice(name, [one.value for one in Question], what="a question", code="unknown-question")
    models = [_pinned(resolve_model(name)) for name in _models(matrix.models)]
    candidates = [str(parse_backend(one)) for text in matrix.candidates for one in expanded(text)]
    if not models or not candidates:
        raise UsageError(
            "a matrix needs a model and a candidate", code="empty-matrix",
            hint="parity-audit matrix MODEL -c 'transformer_lens=={3.9.0,4.3.0}', or --file matrix.yaml",
        )  # fmt: skip
    every = [
        _cell(matrix, Question(question), model, dtype, candidate)
        for question, model, dtype, candidate in itertools.product(
            dict.fromkeys(matrix.questions), dict.fromkeys(models), matrix.dtypes, dict.fromkeys(candidates)
        )
        if question_applies(Question(question), candidate)
    ]
    if not every:
        raise UsageError(
            "none of the candidates samples, so none has log-probabilities to ask for", code="empty-matrix",
            expected=" or ".join(ENGINES), found=", ".join(candidates),
        )  # fmt: skip
    return every


def question_applies(question: Question, candidate: str) -> bool:
    """Return whether a question applies to a candidate: that about log-probabilities needs an engine that samples."""
    return question is not Question.LOGPROBS or parse_backend(candidate).name in ENGINES


def _cell(matrix: Matrix, question: Question, model: str, dtype: str, candidate: str) -> Asked:
    """Return one cell; options that do not apply to its question have the same value in every such cell."""
    audits = question is Question.AUDIT
    return Asked(
        question=question, model=model, candidate=candidate, reference=str(parse_backend(matrix.reference)),
        synthetic=matrix.synthetic, seed=matrix.seed, dtype=dtype, device=matrix.device,
        probes=matrix.probes if audits else (), repair=matrix.repair or not audits,
        options=(QUICK,) if matrix.quick and question is Question.INVARIANCE else (), program=__version__,
    )  # fmt: skip


def _pinned(model: ResolvedModel) -> str:
    """Return the hub id of a model, with the revision if one was requested."""
    return f"{model.repo_id}@{model.revision}" if model.revision else model.repo_id


def _models(names: Sequence[str]) -> list[str]:
    """Return the names of models, with `all` replaced by the first released model of every architecture."""
    if EVERY_ARCHITECTURE not in names:
        return list(names)
    every = [spec.first_model for spec in list_specs() if spec.content.models]
    return [*every, *(name for name in names if name != EVERY_ARCHITECTURE)]


def read_matrix(path: Path) -> Matrix:
    """Read a matrix file. Its keys are the fields of `Matrix`; fields that are tuples there are lists here.

    Raises:
        UsageError: there is no such file, a key is unknown or missing, or a value has the wrong type.
    """
    if not path.is_file():
        raise UsageError(f"no matrix file `{path}`", code="bad-matrix", where=str(path.absolute()))
    data = dict(read_yaml(path))
    rules = read_rules(data.pop("resources", []), str(path))
    known = {item.name: item for item in fields(Matrix)}
    for key, value in data.items():
        if key not in known:
            raise _refused(path, f"`{key}` is not a key of a matrix", ", ".join(known), nearest(str(key), known))
        wanted = "a list" if isinstance(known[key].default, tuple) or key in ("models", "candidates") else "one value"
        if isinstance(value, list) != (wanted == "a list") or isinstance(value, dict):
            raise _refused(path, f"`{key}` is not {wanted}", wanted, "")
    if "models" not in data or "candidates" not in data:
        raise _refused(path, "a matrix needs `models` and `candidates`", "models: [gpt2]", "")
    plain: dict[str, Any] = {
        key: tuple(map(str, item)) if isinstance(item, list) else item for key, item in data.items()
    }
    return Matrix(**plain, resources=rules)


def _refused(path: Path, message: str, expected: str, hint: str) -> UsageError:
    return UsageError(message, code="bad-matrix", where=str(path), expected=expected, hint=hint)
