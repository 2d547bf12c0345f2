"""Ways to run one and the same sequence of token ids, the subject: what a busy engine may do to it.

Every condition names the one whose bits it is held against, and the group of conditions that a kernel cannot tell from it
(same batch, same steps): those must have equal bits where only the shape of a run decides.
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
"""Tokens of a page of a paged cache, in the sizes that engines take on a GPU; chunks around it meet its boundary."""
ALONE, DECODED = "alone", "alone, decoded"
SUBJECT, TAIL = 29, 5
"""Tokens of the subject (a prime, so that no chunk size divides it unless it is chosen to), and how many of them are decoded:
enough for several steps, few enough that a batch of 64 is cheap."""
LONG = 45
"""Tokens of the longer neighbour, past the subject's by more than a chunk."""
GROUP = 5
"""Sequences of the batches that vary position and neighbours: past the switches at 2 and 4 rows that matrix products have."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One run: `row` of `probe` is the subject, compared from its own position `start` on. `size` is the number of sequences."""

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
    group: str = ""


def batch_sizes(bound: int) -> tuple[int, ...]:
    """1 to 5, then every power of two with its neighbours, up to `bound`."""
    sizes = {1, 2, 3, 4, 5}
    power = 8
    while power <= bound + 1:
        sizes |= {power - 1, power, power + 1}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= bound))


def chunk_sizes(length: int, page: int | None) -> tuple[int, ...]:
    """Chunks that leave a tail of one, two and many tokens, tiny ones, and a page with its neighbours, where pages are known."""
    sizes = {2, 7, 8, (length - 1) // 2, length // 2 + 1, length - 1, length - 2, length - 3}
    sizes |= {page - 1, page, page + 1} if page else set()
    return tuple(sorted(size for size in sizes if 1 < size < length))


@dataclass
class Planner:
    """Builds conditions for one subject; `draw` makes the neighbours."""

    subject: Ids
    vocab: int
    bos: int | None
    draw: random.Random

    def neighbour(self, length: int) -> Ids:
        """Random ids behind the same first token."""
        ids = tuple(self.draw.randrange(8, self.vocab) if self.vocab > 8 else 0 for _ in range(length))
        return ids if self.bos is None else (self.bos, *ids[1:])

    def among(self, size: int, row: int, *, length: int | None = None) -> list[Ids]:
        """A batch of `size` with the subject at `row`; its neighbours have its length, or another one."""
        rows = [self.neighbour(length or len(self.subject)) for _ in range(size - 1)]
        return [*rows[:row], self.subject, *rows[row:]]


def alone(subject: Ids) -> tuple[Condition, Condition]:
    """The two bases: the subject at once, and its last tokens decoded."""
    whole = Condition(axis="", name=ALONE, probe=probe(ALONE, [subject]), group="1")
    decoded = replace(whole, name=DECODED, probe=probe(DECODED, [subject], len(subject) - TAIL), cached=True)
    return whole, replace(decoded, start=len(subject) - TAIL, group="1 decoded")


def probe(name: str, rows: Sequence[Ids], decode_from: int | None = None, *, left: bool = False) -> Probe:
    """Rows padded to one length, under a name that a file can have."""
    label = name.replace(" ", "-").replace(",", "")
    return padded(label, "invariance", [list(row) for row in rows], left=left, decode_from=decode_from)


def batches(plan: Planner, sizes: Sequence[int]) -> list[Condition]:
    """Every size with random neighbours, once as a prompt and once decoded."""
    found = []
    start = len(plan.subject) - TAIL
    for size in sizes:
        if size == 1:
            continue
        rows = plan.among(size, 0)
        found.append(
            Condition(axis=PREFILL, name=str(size), size=size, group=str(size), probe=probe(f"prefill {size}", rows))
        )
        found.append(
            Condition(
                axis=DECODE, name=str(size), size=size, group=f"{size} decoded", base=DECODED, cached=True, start=start,
                probe=probe(f"decode {size}", rows, start),
            )
        )  # fmt: skip
    return found


def places(plan: Planner, size: int = GROUP) -> list[Condition]:
    """The subject in the middle, last and anywhere in a batch that it is the first of elsewhere, as prompt and decoded."""
    start = len(plan.subject) - TAIL
    named = {"middle": size // 2, "last": size - 1, "random": plan.draw.randrange(1, size)}
    found = []
    for name, row in named.items():
        rows = plan.among(size, row)
        shared = {"axis": POSITION, "row": row, "size": size}
        found.append(Condition(name=f"{name} of {size}", probe=probe(f"{name}", rows), group=str(size), **shared))  # type: ignore[arg-type]
        found.append(
            Condition(
                name=f"{name} of {size}, decoded", probe=probe(f"{name} decoded", rows, start), cached=True, start=start,
                base=DECODED, group=f"{size} decoded", **shared,  # type: ignore[arg-type]
            )
        )  # fmt: skip
    return found


def neighbours(plan: Planner, size: int = GROUP) -> list[Condition]:
    """Other kinds of neighbours in a batch of one size; those of another length make it a batch of another shape."""
    subject = plan.subject
    kinds = {
        "copies": ([subject] * size, str(size)),
        "random": (plan.among(size, 0), str(size)),
        "short": (plan.among(size, 0, length=len(subject) // 3), f"{size} short"),
        "long": (plan.among(size, 0, length=LONG), f"{size} long"),
    }
    return [
        Condition(axis=NEIGHBOURS, name=name, size=size, group=group, probe=probe(f"neighbours {name}", rows))
        for name, (rows, group) in kinds.items()
    ]


def paddings(plan: Planner) -> list[Condition]:
    """Padding on the right and on the left, for a neighbour that is longer by one token and by many."""
    found = []
    for side in ("right", "left"):
        for more in (1, LONG - len(plan.subject)):
            rows = [plan.subject, plan.neighbour(len(plan.subject) + more)]
            name = f"{side} by {more}"
            own = probe(f"padding {name}", rows, left=side == "left")
            found.append(Condition(axis=PADDING, name=name, size=2, group=f"padded {more} {side}", probe=own))
    return found


def steps(plan: Planner, page: int | None) -> list[Condition]:
    """Decoding, from the second token on and from later ones, and chunks of the prompt."""
    subject = plan.subject
    starts = sorted({1, len(subject) // 2, len(subject) - TAIL, len(subject) - 1})
    decoded = [
        Condition(
            axis=CACHED, name=f"from {start}", start=start, cached=True, group=f"decoded from {start}",
            probe=probe(f"decoded from {start}", [subject], start),
        )
        for start in starts
    ]  # fmt: skip
    chunked = [
        Condition(
            axis=CHUNK, name=str(size), chunk=size, group=f"chunk {size}", probe=probe(f"chunk {size}", [subject])
        )
        for size in chunk_sizes(len(subject), page)
    ]
    return [*decoded, *chunked]


def again(base: Condition, counts: Sequence[int]) -> list[Condition]:
    """The base once more, and with these numbers of threads."""
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
    """A run of the same shape with other neighbours, or, where the subject is alone, the same run again."""
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
    """`own` with its real tokens replaced by those of `fresh`, padding left as it is."""
    given = iter(fresh)
    return tuple(next(given) if real else token for token, real in zip(own, mask, strict=True))
