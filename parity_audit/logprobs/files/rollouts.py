"""Read rollout rows (JSONL or Parquet) of any known framework as completions with the log-probabilities of both sides.

The framework is recognised by the keys of the first row. A row that lacks a needed key, whose lists have different lengths, or
that holds something other than numbers raises an error that names its line. Rows without a sampled token are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.core.rollouts import Completion
from parity_audit.logprobs.files.layouts import LAYOUTS, Layout


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The sampled tokens of a file.

    `completions[i].logprobs` are the log-probabilities of the inference engine, `train[i]` those of the trainer (empty if the
    row has none).
    """

    framework: str
    completions: tuple[Completion, ...]
    train: tuple[tuple[float, ...], ...]

    @property
    def has_train(self) -> bool:
        """Whether at least one row holds the trainer's log-probabilities too."""
        return any(self.train)


def read_rollouts(path: Path, *, framework: str | None = None) -> Rollouts:
    """Read a .jsonl, .json or .parquet file.

    Raises:
        UsageError: the file does not exist or is of another kind, pyarrow is missing for a Parquet file, `framework` is
            unknown, or the first row has the keys of no known framework.
        NotJudged: the file has no rows or no sampled token, or a row cannot be read.
    """
    rows = list(_rows(path))
    if not rows:
        raise NotJudged(f"{path} has no rows", code="no-tokens", hint="a rollout file holds one completion per row")
    layout = _layout(rows[0][1], framework, path)
    pairs = [_completion(row, layout, f"{path}:{number}") for number, row in rows]
    kept = [(completion, train) for completion, train in pairs if completion.token_ids]
    if not kept:
        raise NotJudged(f"{path} has no sampled token: every mask is zero", code="no-tokens", where=str(path))
    return Rollouts(
        framework=layout.framework, completions=tuple(completion for completion, _ in kept),
        train=tuple(train for _, train in kept),
    )  # fmt: skip


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of the file with their numbers: lines or Parquet rows, from 1; empty lines are skipped."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", code="rollout-file", hint="give a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise UsageError(
            f"{path.name} is neither .jsonl nor .parquet", code="rollout-file",
            hint="pickled dumps (.pt, .pkl) are not read: they can run code; write the rows as JSONL",
        )  # fmt: skip
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _object(line, f"{path}:{number}")


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotJudged(f"a row is not valid JSON: {error}", code="rollout-row", where=where) from None
    if not isinstance(row, dict):
        raise NotJudged("a row is not a JSON object", code="rollout-row", where=where)
    return row


def _parquet(path: Path) -> list[Mapping[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError("reading Parquet needs pyarrow", code="rollout-file", hint="pip install pyarrow") from None
    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises exceptions of several classes for damaged files
        raise NotJudged(f"{path} cannot be read: {error}", code="rollout-row", where=str(path)) from None
    return rows


def _layout(row: Mapping[str, Any], framework: str | None, path: Path) -> Layout:
    known = [layout for layout in LAYOUTS if framework in (None, layout.framework)]
    if not known:
        names = ", ".join(layout.framework for layout in LAYOUTS)
        raise UsageError(f"no rollout format is called `{framework}`", code="rollout-format", expected=names)
    fitting = [layout for layout in known if _fits(layout, row)]
    if not fitting:
        raise UsageError(
            f"the rows of {path.name} are of no known framework", code="rollout-format", where=f"{path}:1",
            found=", ".join(sorted(row)), expected="for example prompt_ids, token_ids, rollout_logprobs, train_logprobs",
        )  # fmt: skip
    return max(fitting, key=lambda layout: _keys_present(layout, row))


def _fits(layout: Layout, row: Mapping[str, Any]) -> bool:
    needed = [layout.ids, layout.rollout, *((keys) for keys in (layout.prompt, layout.length) if keys)]
    return all(_value(row, keys) is not None for keys in needed)


def _keys_present(layout: Layout, row: Mapping[str, Any]) -> int:
    """Return how many optional fields of a layout a row has; a row that fits several layouts is read by the one with the most."""
    groups = (layout.mask, layout.train, layout.whole_mask, layout.prompt, layout.length, layout.prompt_mask)
    return sum(any(key in row for key in keys) for keys in groups)


def _value(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _completion(row: Mapping[str, Any], layout: Layout, where: str) -> tuple[Completion, tuple[float, ...]]:
    ids = _integers(_needed(row, layout.ids, where), where)
    mask = _mask(row, layout, len(ids), where)
    places = [place for place, sampled in enumerate(mask) if sampled]
    own = _integers(_value(row, layout.prompt), where) if layout.prompt else ids[: places[0]] if places else ()
    if places and places[-1] - places[0] + 1 != len(places):
        raise NotJudged(
            "the sampled tokens of a row are not one run: its mask has gaps", code="rollout-row", where=where,
            hint="write one row per turn, with everything before it as its prompt",
        )  # fmt: skip
    rollout = _per_token(_needed(row, layout.rollout, where), places, ids, layout, where)
    train = _value(row, layout.train)
    completion = Completion(
        prompt_ids=_unpadded(own, row, layout), token_ids=tuple(ids[place] for place in places), logprobs=rollout
    )
    return completion, () if train is None else _per_token(train, places, ids, layout, where)


def _needed(row: Mapping[str, Any], keys: Sequence[str], where: str) -> Any:
    value = _value(row, keys)
    if value is None:
        raise NotJudged(f"a row has no `{keys[0]}`", code="rollout-row", where=where, found=", ".join(sorted(row)))
    return value


def _mask(row: Mapping[str, Any], layout: Layout, tokens: int, where: str) -> list[bool]:
    """Return for each id whether it was sampled.

    A mask that covers only the completion, or that has no entry for the first token, is aligned with the ids.
    """
    value = _value(row, layout.mask)
    sampled = tokens if not layout.length else int(_needed(row, layout.length, where))
    marks = [1] * sampled if value is None else [int(mark) for mark in _list(value, where)]
    if layout.shifted and len(marks) == tokens - 1:
        marks = [0, *marks]
    if layout.length and len(marks) == sampled:
        marks = [0] * (tokens - sampled) + marks
    if len(marks) != tokens:
        raise NotJudged(f"a mask has {len(marks)} entries for {tokens} tokens", code="rollout-row", where=where)
    return [bool(mark) for mark in marks]


def _per_token(value: Any, places: Sequence[int], ids: Sequence[int], layout: Layout, where: str) -> tuple[float, ...]:
    """Return the log-probabilities of the sampled tokens.

    `value` has one entry for each id, or for each id but the first (`shifted`), or for the last ids (layouts with `length`).
    """
    numbers = [_number(item, where) for item in _list(value, where)]
    missing = len(ids) - len(numbers)
    aligned = missing == 0 or (missing == 1 and layout.shifted) or bool(layout.length)
    if missing < 0 or not aligned or (places and places[0] < missing):
        raise NotJudged(
            f"a row has {len(numbers)} log-probabilities for {len(ids)} tokens", code="rollout-row", where=where
        )
    return tuple(numbers[place - missing] for place in places)


def _unpadded(prompt: Sequence[int], row: Mapping[str, Any], layout: Layout) -> tuple[int, ...]:
    """Return the prompt without the tokens that the row's mask marks as padding; without such a mask, the whole prompt."""
    mask = _value(row, layout.prompt_mask) or _value(row, layout.whole_mask)
    if mask is None or len(mask) < len(prompt):
        return tuple(prompt)
    return tuple(token for token, real in zip(prompt, mask, strict=False) if real)


def _list(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise NotJudged(f"a list was expected, not {type(value).__name__}", code="rollout-row", where=where)


def _integers(value: Any, where: str) -> tuple[int, ...]:
    items = _list(value, where)
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
        raise NotJudged("token ids are whole numbers from 0 on", code="rollout-row", where=where)
    return tuple(items)


def _number(value: Any, where: str) -> float:
    """Return a log-probability; null (no value) becomes NaN, for which a later comparison raises an error."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotJudged(f"`{value!r}` is no log-probability", code="rollout-row", where=where)
    return float(value)
