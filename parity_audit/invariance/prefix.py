"""Test the prefix cache of an engine: a prompt is computed ("cold"), read from the cache ("hot"), and read in part.

The engine's own counter says how many tokens came from the cache. If it differs from the number that was arranged, the run is
reported as not tested, because equal results prove nothing if the cache was not used.
"""

from __future__ import annotations

from dataclasses import replace

from parity_audit.core.types import Edit
from parity_audit.invariance.conditions import PREFIX, Condition, Ids, Planner, probe
from parity_audit.invariance.observe import CACHED_TOKENS, Seen
from parity_audit.invariance.runs import SCHEDULERS, Floors, Runs

COLD = "cold"
LENGTH = 261
"""The number of tokens of the prompt: two pages of 128, vLLM's size on a CPU, and five more."""
EDGE = 128
"""About how many tokens another prompt shares with it: a whole number of pages, one token fewer, and one more."""
SETTING = "enable_prefix_caching"
NO_CACHE = "this backend keeps no keys and values from one prompt to the next"


def long_subject(plan: Planner, limit: int | None) -> Ids | None:
    """Return a prompt of several pages; None if the model has too few positions for it."""
    return None if limit is not None and limit <= LENGTH else plan.neighbour(LENGTH)


def prefix_cache(runs: Runs, subject: Ids | None, floor: Floors) -> None:
    """Load the engine with its prefix cache on, and run the prompt cold, hot, and after prompts that share a part of it."""
    whole = Condition(axis=PREFIX, name=COLD, base=COLD, probe=probe(COLD, [subject or (0,)]))
    engine = SCHEDULERS.get(runs.session.plan.backend_key)
    if engine is None:
        return runs.leave(replace(whole, name="cold, hot, partial"), NO_CACHE)
    if subject is None:
        return runs.leave(replace(whole, name="cold, hot, partial"), f"the model has fewer than {LENGTH} positions")
    runs.session.apply((Edit(op="load", value={**runs.session.load_settings, SETTING: True}),))
    cold = runs.see(whole)
    runs.bases[COLD] = _proven(cold, 0)
    if runs.bases[COLD].gap:
        return runs.leave(replace(whole, name="cold, hot, partial"), runs.bases[COLD].gap)
    page = int(runs.session.description().settings.get(engine.page) or 0)
    edge = max(1, EDGE // page) * page if page else 0
    shares = {"hot": len(subject) - 1} | {f"{edge + more} tokens shared": edge + more for more in (-1, 0, 1) if page}
    for name, shared in shares.items():
        asked = replace(whole, name=name, probe=replace(whole.probe, name=name.replace(" ", "-")))
        runs.test(asked, floor=floor, look=lambda asked=asked, shared=shared: _behind(runs, asked, shared, page))  # type: ignore[misc]
    return None


def _behind(runs: Runs, condition: Condition, shared: int, page: int) -> Seen:
    """Run another prompt that begins with the same `shared` tokens in an empty cache, then the prompt itself."""
    subject = condition.probe.token_ids[0]
    other = (*subject[:shared], *runs.plan.neighbour(len(subject) - shared + 1)[1:])
    if other[shared] == subject[shared]:
        other = (*other[:shared], (other[shared] + 1) % runs.question.vocab, *other[shared + 1 :])
    runs.see(Condition(axis=PREFIX, name="prime", probe=probe("prime", [other])))
    return _proven(runs.see(condition, keep_cache=True), shared // page * page if page else 0)


def _proven(seen: Seen, expected: int) -> Seen:
    """Return the run, or a gap if the engine's counter does not say that `expected` tokens came from its cache."""
    counted = seen.facts.get(CACHED_TOKENS)
    if seen.gap or counted == expected:
        return seen
    said = "does not count cached tokens" if counted is None else f"counted {counted} cached tokens"
    return Seen(gap=f"the engine {said}, {expected} were arranged", facts=seen.facts)
