"""Judge a condition by its bits and its distance to the base, and combine the verdicts of several conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK
from parity_audit.core.invariance_report import AxisResult, CandidateInvariance, ConditionResult, Invariance, SiteChange
from parity_audit.core.limits import PARITY_RATIO, limit_of
from parity_audit.invariance import distances
from parity_audit.invariance.classes import classes_of, name_words, size_words
from parity_audit.invariance.conditions import ALONE, DECODED, PROCESS, QUESTIONS, REPEAT, Condition
from parity_audit.invariance.distances import Floor
from parity_audit.invariance.observe import Seen

ORDER = (Invariance.BITWISE, Invariance.CLASS_ONLY, Invariance.NUMERIC, Invariance.BROKEN, Invariance.ERROR)


def compared_sites(seen: Seen, base: Seen) -> list[str]:
    """Return the sites that both runs captured with the same shape."""
    both = seen.values.keys() & base.values.keys()
    return sorted(site for site in both if seen.values[site].shape == base.values[site].shape)


def judged(
    condition: Condition, seen: Seen, base: Seen, *, again: Seen | None, floor: Mapping[str, Floor], dtype: str
) -> ConditionResult:
    """Compare one condition with its base and judge it.

    `again` is another run of the same shape; None if nothing differed or it has not been run yet. If the two runs have no
    token in common, the result has a gap and no verdict.
    """
    sites = [] if seen.gap else compared_sites(seen, base)
    start = max(condition.start, seen.start)
    shared: dict[str, Any] = {
        "axis": condition.axis,
        "name": condition.name,
        "base": condition.base,
        "facts": dict(seen.facts),
    }
    if not sites or start >= max(len(seen.values[site]) for site in sites):
        return ConditionResult(verdict=None, gap=seen.gap or "it shows no token that the base shows", **shared)
    own, theirs = distances.bits(seen.values, start), distances.bits(base.values, start)
    moved = [site for site in sites if own[site] != theirs[site]]
    changed = distances.changes(seen.values, base.values, moved, start, floor, dtype) if not seen.non_finite else ()
    same = None if again is None else _same(again, own, sites, start)
    verdict, why = _decided(condition, seen, changed, len(sites), same)
    logits, before = distances.returned(seen.values), distances.returned(base.values)
    finite = logits is not None and before is not None and not seen.non_finite
    return ConditionResult(
        verdict=verdict, why=why, bits=distances.joint(own, sites), sites=len(sites), changed=changed,
        first_site=changed[0].site if changed else None,
        logits_max_abs=float((logits[start:] - before[start:]).abs().max()) if finite else 0.0,  # type: ignore[index]
        nats=distances.nats(logits[start:], before[start:]) if finite else 0.0,  # type: ignore[index]
        repeatable=same, **shared,
    )  # fmt: skip


def _decided(
    condition: Condition, seen: Seen, changed: Sequence[SiteChange], sites: int, same: bool | None
) -> tuple[Invariance, str]:
    """Return the verdict and its reason; `same` says whether another run of the same shape had the same bits."""
    if seen.non_finite:
        return Invariance.BROKEN, f"not finite at {seen.non_finite[0]}"
    if not changed:
        return Invariance.BITWISE, f"the same bits at {sites} sites"
    worst = worst_change(changed)
    if worst is not None and worst.ratio is not None and worst.ratio > PARITY_RATIO:
        return Invariance.BROKEN, (
            f"{worst.ratio:.3g}x the noise floor at {worst.site}, position {worst.position} (limit {PARITY_RATIO:g}x)"
        )
    near = f"at most {worst.ratio:.2g}x the noise floor (at {worst.site})" if worst is not None else "no floor is known"
    if condition.axis in (REPEAT, PROCESS):
        return Invariance.NUMERIC, f"{near}; the run itself does not repeat"
    if same:
        return Invariance.CLASS_ONLY, f"{near}; the same bits with other content of the same shape"
    return Invariance.NUMERIC, f"{near}; other bits with other content of the same shape"


def worst_change(changed: Sequence[SiteChange]) -> SiteChange | None:
    """Return the change that is the most noise floors large, among the outputs and the residual stream, which decide."""
    deciding = [one for one in changed if one.ratio is not None and limit_of(one.site) == PARITY_RATIO]
    return max(deciding, key=lambda one: one.ratio or 0.0, default=None)


def _same(again: Seen, own: Mapping[str, str], sites: Sequence[str], start: int) -> bool:
    theirs = distances.bits(again.values, start)
    return all(theirs.get(site) == own[site] for site in sites)


def axis(name: str, done: Sequence[tuple[Condition, Seen, ConditionResult]], bases: Mapping[str, Seen]) -> AxisResult:
    """Return the result of one question: its conditions, their classes of equal bits, and the worst verdict.

    The classes are formed for each base separately, at the sites and positions that all conditions with that base show.
    """
    results = tuple(result for _, _, result in done)
    ran = [(condition, seen) for condition, seen, result in done if result.verdict is not None]
    groups: list[tuple[str, ...]] = []
    words: list[str] = []
    for base in dict.fromkeys(condition.base for condition, _ in ran):
        own = [(condition, seen) for condition, seen in ran if condition.base == base]
        sizes = all(condition.name.isdigit() and condition.size > 1 for condition, _ in own)
        found = _classes(own, bases[base], "1" if sizes and base in (ALONE, DECODED) else base)
        groups += found
        words.append(size_words(found) if sizes else name_words(found))
    return AxisResult(
        name=name, question=QUESTIONS[name], verdict=worst(result.verdict for result in results), classes=tuple(groups),
        words="; ".join(words), conditions=results,
    )  # fmt: skip


def _classes(own: Sequence[tuple[Condition, Seen]], base: Seen, base_name: str) -> tuple[tuple[str, ...], ...]:
    start = max(max(condition.start, seen.start) for condition, seen in own)
    sites = sorted(set.intersection(*(set(compared_sites(seen, base)) for _, seen in own)))
    every = [(base_name, base), *((condition.name, seen) for condition, seen in own)]
    return classes_of(
        [name for name, _ in every],
        [
            distances.joint(distances.bits({site: seen.values[site] for site in sites}, start), sites)
            for _, seen in every
        ],
    )


def worst(verdicts: Iterable[Invariance | None]) -> Invariance | None:
    """Return the worst verdict; None if there is none."""
    return max((one for one in verdicts if one is not None), key=ORDER.index, default=None)


def exit_code(candidates: Sequence[CandidateInvariance]) -> int:
    """Return 1 if a candidate is broken, otherwise 3 if a candidate (or all) could not be judged, otherwise 0."""
    verdicts = {one.verdict for one in candidates}
    if Invariance.BROKEN in verdicts:
        return EXIT_MISMATCH
    return EXIT_NOT_JUDGED if Invariance.ERROR in verdicts or not verdicts else EXIT_OK
