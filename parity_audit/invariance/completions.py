"""Generate greedy completions of one prompt while the number of its neighbours in the batch changes, as on a busy server."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.core.errors import BackendFailed, NotJudged
from parity_audit.core.invariance_report import Completions, Divergent
from parity_audit.core.rollouts import SampleRequest, Sampling
from parity_audit.core.types import NotTested
from parity_audit.invariance.conditions import Condition, Ids, Planner, probe
from parity_audit.invariance.distances import returned
from parity_audit.invariance.observe import observe

LARGEST_BATCH = 16
"""The number of sequences in the largest generated batch; it is small because every step of every batch is a run of the model."""


@dataclass(frozen=True)
class _Drawn:
    """One completion of the subject: the batch it was in, its row there, and its tokens."""

    batch: int
    row: int
    tokens: Ids


def completions(
    session: Session, plan: Planner, runs: int, tokens: int, moved: float, out: Path
) -> tuple[Completions | None, tuple[NotTested, ...]]:
    """Generate the prompt alone, then in batches of random size at a random row, and compare the tokens.

    `moved` is the largest change of a logit that the other runs of this audit have shown. If the backend cannot generate,
    the first value is None, and the second says why.
    """
    draw = random.Random(plan.draw.random())
    loads = [
        (1, 0),
        *((size, draw.randrange(size)) for size in (draw.randint(2, LARGEST_BATCH) for _ in range(runs - 1))),
    ]
    drawn = []
    for number, (size, row) in enumerate(loads):
        session.progress.update("generate", f"{session.label}: batch of {size}", number, len(loads))
        request = SampleRequest(
            prompts=tuple(plan.among(size, row)),
            sampling=Sampling(temperature=0.0, max_new_tokens=tokens, ignore_eos=True),
        )
        try:
            reply = session.sample(request)
        except BackendFailed as error:
            return None, (NotTested(what="greedy completions", why=error.message),)
        drawn.append(_Drawn(size, row, reply.completions[row].token_ids))
    counted = Counter(one.tokens for one in drawn)
    firsts = {one.tokens: one for one in reversed(drawn)}
    others = [firsts[own] for own in counted if own != drawn[0].tokens]
    return Completions(
        runs=len(drawn), tokens=tokens, unique=len(counted), batches=tuple(one.batch for one in drawn),
        divergent=tuple(_divergent(session, plan.subject, drawn[0].tokens, one, moved, out) for one in others),
    ), ()  # fmt: skip


def _divergent(session: Session, subject: Ids, alone: Ids, other: _Drawn, moved: float, out: Path) -> Divergent:
    """Return where a completion first differs from that of the prompt alone.

    The margin between the two largest logits there is taken from a run of the prompt and the tokens before that place.
    """
    at = next(place for place, pair in enumerate(zip(alone, other.tokens, strict=True)) if pair[0] != pair[1])
    whole = Condition(axis="", name="margin", probe=probe("margin", [(*subject, *alone[:at])]))
    logits = returned(observe(session, whole, out).values)
    if logits is None:
        raise NotJudged(f"{session.label} shows no logits behind {len(alone[:at])} generated tokens", code="no-margin")
    first, second = logits[-1].double().topk(2).values.tolist()
    return Divergent(
        batch=other.batch, row=other.row, position=at, token_id=other.tokens[at], alone_token_id=alone[at],
        margin=first - second, moved=moved, tie=first - second <= 2.0 * moved,
    )  # fmt: skip
