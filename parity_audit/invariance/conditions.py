"""The conditions under which one sequence of token ids, the subject, is run: what a busy engine may do with a request.

Every condition names its base, the condition whose bits its own are compared with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parity_audit.capture.probes import padded
from parity_audit.core.types import Probe

Ids = tuple[int, ...]
PREFILL, DECODE, CHUNK = "batch, prefill", "batch, decode", "chunked prefill"
POSITION, NEIGHBOURS, PADDING, CACHED = "position in the batch", "neighbours", "padding", "cached decode"
REPEAT, PROCESS, THREADS, PREFIX = "repeat", "fresh process", "threads", "prefix cache"
QUESTIONS = {
    PREFILL: "the prompt alone and in batches, all positions",
    DECODE: "the last tokens decoded from the cache, alone and in batches",
    POSITION: "first, middle, last or any row of one batch",
    NEIGHBOURS: "copies of it, random ids, short and long ones",
    PADDING: "padded on either side because of a longer neighbour",
    CACHED: "one token at a time from the cache, against the prompt at once",
    CHUNK: "the prompt in chunks, against at once",
    PREFIX: "the prompt computed, and taken out of the engine's prefix cache",
    REPEAT: "the same run again in this process",
    PROCESS: "the same run in a fresh process",
    THREADS: "the same run with other numbers of threads",
}
RUN_TO_RUN = (REPEAT, PROCESS, THREADS)
PAGE = 16
"""The number of tokens in a page of a paged KV cache, as engines choose it on a GPU; chunks of this size end at its boundary."""
ALONE, DECODED = "alone", "alone, decoded"
SUBJECT, TAIL = 29, 5
"""The number of tokens of the subject, and how many of them are decoded.

The length is a prime number, so that no chunk size divides it by accident. Five decoded tokens are enough for several steps,
and few enough that a batch of 64 is cheap.
"""
LONG = 45
"""The number of tokens of the longer neighbour: longer than the subject by more than a chunk."""
GROUP = 5
"""The size of the batches that vary position and neighbours: matrix products change their kernel at 2 and at 4 rows."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One run of the model: `row` of `probe` is the subject, which is compared from its own position `start` on.

    `axis` is the question that the condition belongs to (a key of `QUESTIONS`), `base` the name of the condition that it is
    compared with, and `size` the number of sequences.
    """

    axis: str
    name: str
    probe: Probe
    base: str = ALONE
    row: int = 0
    start: int = 0
    cached: bool = False
    chunk: int | None = None
    threads: int | None = None
    size: int = 1


def batch_sizes(bound: int) -> tuple[int, ...]:
    """Return the sizes to test: 1 to 5, then every power of two from 8 on with its two neighbours, up to `bound`."""
    sizes = {1, 2, 3, 4, 5}
    power = 8
    while power <= bound + 1:
        sizes |= {power - 1, power, power + 1}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= bound))


def chunk_sizes(length: int, page: int | None) -> tuple[int, ...]:
    """Return the chunk sizes to test.

    These are tiny chunks, chunks that leave a last chunk of one, two, three or about half of the tokens, and, if the page
    size is known, a page and its two neighbours.
    """
    sizes = {2, 7, 8, (length - 1) // 2, length // 2 + 1, length - 1, length - 2, length - 3}
    sizes |= {page - 1, page, page + 1} if page else set()
    return tuple(sorted(size for size in sizes if 1 < size < length))


@dataclass
class Planner:
    """Builds the batches of one subject; `draw` is the source of random numbers for the neighbours' tokens."""

    subject: Ids
    vocab: int
    bos: int | None
    draw: random.Random

    def neighbour(self, length: int) -> Ids:
        """Return a sequence of random ids, which starts with the beginning-of-sequence token if the model has one."""
        ids = tuple(self.draw.randrange(8, self.vocab) if self.vocab > 8 else 0 for _ in range(length))
        return ids if self.bos is None else (self.bos, *ids[1:])

    def among(self, size: int, row: int, *, length: int | None = None) -> list[Ids]:
        """Return a batch of `size` sequences with the subject at `row`; its neighbours have its length, or `length`."""
        rows = [self.neighbour(length or len(self.subject)) for _ in range(size - 1)]
        return [*rows[:row], self.subject, *rows[row:]]


def alone(subject: Ids) -> tuple[Condition, Condition]:
    """Return the two base conditions: the subject alone in one pass, and alone with its last tokens decoded."""
    whole = Condition(axis="", name=ALONE, probe=probe(ALONE, [subject]))
    decoded = replace(whole, name=DECODED, probe=probe(DECODED, [subject], len(subject) - TAIL), cached=True)
    return whole, replace(decoded, start=len(subject) - TAIL)


def probe(name: str, rows: Sequence[Ids], decode_from: int | None = None, *, left: bool = False) -> Probe:
    """Return a probe of rows padded to one length, under a name that can be used as a file name."""
    label = name.replace(" ", "-").replace(",", "")
    return padded(label, "invariance", [list(row) for row in rows], left=left, decode_from=decode_from)


def batches(plan: Planner, sizes: Sequence[int]) -> list[Condition]:
    """Return two conditions per batch size above 1, with random neighbours: the whole prompt, and its last tokens decoded."""
    found = []
    start = len(plan.subject) - TAIL
    for size in sizes:
        if size == 1:
            continue
        rows = plan.among(size, 0)
        found.append(Condition(axis=PREFILL, name=str(size), size=size, probe=probe(f"prefill {size}", rows)))
        found.append(
            Condition(
                axis=DECODE, name=str(size), size=size, base=DECODED, cached=True, start=start,
                probe=probe(f"decode {size}", rows, start),
            )
        )  # fmt: skip
    return found


def places(plan: Planner, size: int = GROUP) -> list[Condition]:
    """Return conditions with the subject in the middle, last and at a random row of a batch, each as prompt and decoded.

    In the conditions of the other axes the subject is the first row.
    """
    start = len(plan.subject) - TAIL
    named = {"middle": size // 2, "last": size - 1, "random": plan.draw.randrange(1, size)}
    found = []
    for name, row in named.items():
        rows = plan.among(size, row)
        shared = {"axis": POSITION, "row": row, "size": size}
        found.append(Condition(name=f"{name} of {size}", probe=probe(f"{name}", rows), **shared))  # type: ignore[arg-type]
        found.append(
            Condition(
                name=f"{name} of {size}, decoded", probe=probe(f"{name} decoded", rows, start), cached=True, start=start,
                base=DECODED, **shared,  # type: ignore[arg-type]
            )
        )  # fmt: skip
    return found


def neighbours(plan: Planner, size: int = GROUP) -> list[Condition]:
    """Return conditions with other kinds of neighbours in a batch of `size`; some give the batch another length."""
    subject = plan.subject
    kinds = {
        "copies": [subject] * size,
        "random": plan.among(size, 0),
        "short": plan.among(size, 0, length=len(subject) // 3),
        "long": plan.among(size, 0, length=LONG),
    }
    return [
        Condition(axis=NEIGHBOURS, name=name, size=size, probe=probe(f"neighbours {name}", rows))
        for name, rows in kinds.items()
    ]


def paddings(plan: Planner) -> list[Condition]:
    """Return conditions in which the subject is padded on the right or left, for a neighbour longer by one or many tokens."""
    found = []
    for side in ("right", "left"):
        for more in (1, LONG - len(plan.subject)):
            rows = [plan.subject, plan.neighbour(len(plan.subject) + more)]
            name = f"{side} by {more}"
            own = probe(f"padding {name}", rows, left=side == "left")
            found.append(Condition(axis=PADDING, name=name, size=2, probe=own))
    return found


def steps(plan: Planner, page: int | None) -> list[Condition]:
    """Return conditions that decode the subject from the second or a later token on, or prefill it in chunks."""
    subject = plan.subject
    starts = sorted({1, len(subject) // 2, len(subject) - TAIL, len(subject) - 1})
    decoded = [
        Condition(
            axis=CACHED, name=f"from {start}", start=start, cached=True,
            probe=probe(f"decoded from {start}", [subject], start),
        )
        for start in starts
    ]  # fmt: skip
    chunked = [
        Condition(axis=CHUNK, name=str(size), chunk=size, probe=probe(f"chunk {size}", [subject]))
        for size in chunk_sizes(len(subject), page)
    ]
    return [*decoded, *chunked]


def again(base: Condition, counts: Sequence[int]) -> list[Condition]:
    """Return the base as a condition that is run once more, and once for each of these numbers of threads."""
    repeat = replace(base, axis=REPEAT, name="again", probe=replace(base.probe, name="again"))
    return [
        repeat,
        *(
            replace(
                base, axis=THREADS, name=str(count), threads=count, probe=replace(base.probe, name=f"threads-{count}")
            )
            for count in counts
        ),
    ]


def twin(condition: Condition, plan: Planner) -> Condition:
    """Return a condition of the same shape with other neighbours; if the subject is alone, it is the same run again."""
    rows = [
        tuple(plan.neighbour(sum(mask)))[: sum(mask)] if number != condition.row else None
        for number, mask in enumerate(condition.probe.mask)
    ]
    ids = tuple(
        own if fresh is None else _filled(own, mask, fresh)
        for own, mask, fresh in zip(condition.probe.token_ids, condition.probe.mask, rows, strict=True)
    )
    return replace(condition, probe=replace(condition.probe, name=f"{condition.probe.name}-twin", token_ids=ids))


def _filled(own: Ids, mask: tuple[int, ...], fresh: Ids) -> Ids:
    """Return `own` with its real tokens replaced by those of `fresh`; padding stays as it is."""
    given = iter(fresh)
    return tuple(next(given) if real else token for token, real in zip(own, mask, strict=True))
