"""Equivalence classes of conditions whose results have equal bits, and their text in a report."""

from __future__ import annotations

from collections.abc import Sequence


def classes_of(names: Sequence[str], bits: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Group names with equal bits, in the order of the first member of each group."""
    groups: dict[str, list[str]] = {}
    for name, own in zip(names, bits, strict=True):
        groups.setdefault(own, []).append(name)
    return tuple(tuple(group) for group in groups.values())


def size_words(classes: Sequence[Sequence[str]]) -> str:
    """Return classes of sizes as text, such as "{1} {2,3} {>=4}"; ">=4" stands for all tested sizes from 4 on."""
    tested = sorted(int(size) for group in classes for size in group)
    return " ".join(f"{{{_group(sorted(map(int, group)), tested)}}}" for group in classes)


def _group(sizes: list[int], tested: list[int]) -> str:
    runs: list[list[int]] = []
    for size in sizes:
        follows = runs and tested.index(size) == tested.index(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ",".join(_run(run, tested[-1]) for run in runs)


def _run(run: list[int], largest: int) -> str:
    if run[-1] == largest and len(run) > 1:
        return f">={run[0]}"
    return ",".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}"


def name_words(classes: Sequence[Sequence[str]]) -> str:
    """Return classes of named conditions as text."""
    return " ".join("{" + "; ".join(group) + "}" for group in classes)


def switches(sizes: Sequence[int], bits: Sequence[str]) -> tuple[int, ...]:
    """Return the sizes whose bits differ from those of the previous size."""
    pairs = zip(sizes[1:], bits, bits[1:], strict=False)
    return tuple(size for size, before, after in pairs if before != after)
