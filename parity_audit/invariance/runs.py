"""The question to each backend, and the runs and results of one backend so far."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity_audit.capture.session import Session
from parity_audit.core.invariance_report import ConditionResult
from parity_audit.core.progress import Progress
from parity_audit.invariance import conditions
from parity_audit.invariance.conditions import LONG, Condition, Ids, Planner
from parity_audit.invariance.distances import Floor
from parity_audit.invariance.observe import Seen, observe
from parity_audit.invariance.verdict import judged

Floors = Mapping[str, Floor]


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The names of three settings of an engine that schedules requests itself.

    `rows` is the largest number of requests in a step, `tokens` the largest number of tokens in a step, and `page` the number
    of tokens in a page of its KV cache, as the loaded engine reports it.
    """

    rows: str
    tokens: str
    page: str


SCHEDULERS = {
    "vllm": Scheduler(rows="max_num_seqs", tokens="max_num_batched_tokens", page="block_size"),
    "sglang": Scheduler(rows="max_running_requests", tokens="max_total_tokens", page="page_size"),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question to every backend: the subject and the sizes of the runs.

    `long_subject` is the prompt for the test of the prefix cache; None if that is not tested or the model has too few
    positions. `bound` is the size of the largest batch.
    """

    subject: Ids
    long_subject: Ids | None
    vocab: int
    bos: int | None
    seed: int
    dtype: str
    bound: int
    threads: tuple[int, ...]
    completions: int
    new_tokens: int
    quick: bool
    folder: Path
    progress: Progress

    def planner(self) -> Planner:
        """Return a new source of neighbours, which gives every backend the same ones."""
        return Planner(subject=self.subject, vocab=self.vocab, bos=self.bos, draw=random.Random(self.seed))


@dataclass
class Runs:
    """One backend under test: the runs of its base conditions, by name, and the results of all conditions so far."""

    session: Session
    question: Question
    floor: Floors
    plan: Planner
    bases: dict[str, Seen] = field(default_factory=dict)
    done: list[tuple[Condition, Seen, ConditionResult]] = field(default_factory=list)

    def see(self, condition: Condition, *, keep_cache: bool = False) -> Seen:
        """Run a condition once; if the program's counters show that another run took place, return a gap."""
        return as_asked(condition, observe(self.session, condition, self.question.folder, keep_cache=keep_cache))

    def test(
        self, condition: Condition, *, floor: Floors | None = None, look: Callable[[], Seen] | None = None
    ) -> ConditionResult:
        """Run a condition, compare it with its base, and keep the result.

        If its bits differ from the base's, another run of the same shape shows whether the shape alone decides the bits.
        `look`, if given, runs the condition instead; it is for conditions that need more than one run.
        """
        own = self.see(condition) if look is None else look()
        base = self.bases[condition.base]
        given: dict[str, Any] = {"floor": self.floor if floor is None else floor, "dtype": self.question.dtype}
        result = judged(condition, own, base, again=None, **given)
        if result.changed:
            again = self.see(conditions.twin(condition, self.plan)) if look is None else look()
            result = judged(condition, own, base, again=again, **given)
        self.done.append((condition, own, result))
        return result

    def leave(self, condition: Condition, why: str) -> None:
        """Keep a condition as not tested, with the reason."""
        self.bases.setdefault(condition.base, Seen(gap=why))
        seen = Seen(gap=why)
        result = judged(condition, seen, seen, again=None, floor=self.floor, dtype=self.question.dtype)
        self.done.append((condition, seen, result))


def as_asked(condition: Condition, seen: Seen) -> Seen:
    """Return the run, or a gap if the program's own counters show that it did not run as the condition asks."""
    said = seen.facts
    short = [
        f"{what} {said[key]}, not {wanted}" for key, what, wanted in (
            ("threads", "threads in force:", condition.threads),
            ("requests_per_step", "most requests in a step of the engine:", condition.size),
        ) if wanted is not None and key in said and said[key] != wanted
    ]  # fmt: skip
    if condition.chunk is not None and said.get("tokens_per_step", condition.chunk) != condition.chunk:
        short.append(f"most tokens in a step of the engine: {said['tokens_per_step']}, not {condition.chunk}")
    return Seen(gap="; ".join(short), facts=said) if short and not seen.gap else seen


def loading(session: Session, question: Question) -> dict[str, Any]:
    """Return load settings with which an engine can run the largest batch in one step; the user's own settings are kept."""
    engine = SCHEDULERS.get(session.plan.backend_key)
    if engine is None:
        return {}
    wanted = {engine.rows: question.bound, engine.tokens: max(2048, 2 * question.bound * LONG)}
    return {key: value for key, value in wanted.items() if key not in session.plan.ref.settings}


def pads(session: Session) -> bool:
    """Return whether the backend pads a batch of sequences of different lengths."""
    return session.plan.backend_key not in SCHEDULERS
