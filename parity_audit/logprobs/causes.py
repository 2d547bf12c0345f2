"""Find why a leg departs from the judge: try hypotheses on the judge, and rank them by the distance that remains.

Each hypothesis changes the prompt or a step of the scoring model. A cause is named if the judge, run under that hypothesis,
is at least ten times closer to the leg. Hypotheses within a factor of two of the best one are reported as tied. Distances are
medians over the tokens that depart. A mean would not do: if a step rounds to a small dtype, a number close to the middle
between two representable ones may be rounded up on one side and down on the other, and a few such tokens would outweigh all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity_audit.core.errors import ParityError
from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.logprob_report import LogprobFinding
from parity_audit.core.rollouts import Completion, Variation
from parity_audit.logprobs.legs import TRAINER
from parity_audit.logprobs.paired import Array

EXPLAINED = 0.1
"""The largest share of the distance that may remain under a named cause: chance does not explain nine tenths of it."""
TIED = 2.0

Rescore = Callable[[Sequence[Completion], Variation], Array]
"""Function that returns the judge's log-probabilities `[token]` of completions under a variation, in the leg's own meaning."""


RoundTrip = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Function that decodes token ids to text and encodes the text again."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special token ids that the checkpoint's files name; None (or empty, for `eos`) for those that they do not name."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A possible cause, how to impose it on the judge, and its remedy; `settings` are load settings of vLLM that remove it."""

    name: str
    message: str
    prompt: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ids: ids
    variation: Variation = field(default_factory=Variation)
    hint: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def hypotheses(
    special: SpecialTokens, completions: Sequence[Completion], round_trip: RoundTrip | None = None
) -> list[Hypothesis]:
    """Return the hypotheses to try on these completions, without those that would change nothing for them."""
    found = [
        Hypothesis(
            name="head.dtype", message="the logits are computed in bfloat16", variation=Variation(head_dtype="bfloat16"),
            hint='vLLM: hf_overrides={"head_dtype": "float32"}; SGLang: --enable-fp32-lm-head',
            settings={"hf_overrides": {"head_dtype": "float32"}},
        ),
        Hypothesis(
            name="rope.dtype", message="the rotary tables are rounded to bfloat16", variation=Variation(rope_dtype="bfloat16")
        ),
    ]  # fmt: skip
    if special.bos is not None:
        bos = special.bos
        found.append(
            Hypothesis(
                name="tokens.bos_twice", message="it was given one more beginning-of-sequence token than the ids say",
                prompt=lambda ids: (bos, *ids), hint="tokenize with add_special_tokens=False after a chat template",
            )
        )  # fmt: skip
        if all(one.prompt_ids[0] == bos and len(one.prompt_ids) > 1 for one in completions):
            found.append(
                Hypothesis(
                    name="tokens.bos_missing", message="it was given no beginning-of-sequence token",
                    prompt=lambda ids: ids[1:],
                )
            )  # fmt: skip
    if round_trip is not None and any(round_trip(one.prompt_ids) != one.prompt_ids for one in completions):
        found.append(
            Hypothesis(
                name="tokens.retokenised", message="it was given the prompts as text, which is cut into other token ids",
                prompt=round_trip, hint="pass token ids from end to end, never text",
            )
        )  # fmt: skip
    seen = {token for one in completions for token in (*one.prompt_ids, *one.token_ids[:-1])}
    hidden = tuple(token for token in special.eos if token in seen)
    if hidden:
        found.append(
            Hypothesis(
                name="tokens.eos_is_pad", message="end-of-sequence tokens are masked out as if they were padding",
                variation=Variation(hidden_tokens=hidden), hint="make the attention mask from lengths, not from ids",
            )
        )  # fmt: skip
    return found


def explain(
    leg: str, values: Array, judge: Array, rounding: float, asked: Sequence[Hypothesis], rescore: Rescore,
    completions: Sequence[Completion],
) -> LogprobFinding:  # fmt: skip
    """Return a finding with the cause that best explains a leg's distance to the judge.

    If no hypothesis explains nine tenths of the distance, the finding is called "unexplained" and lists what remained under
    each hypothesis.

    `rounding` is the RMSE in nats of rounding alone. Tokens depart if they differ from the judge by more than four times
    that. A hypothesis that the model does not support (no rotary tables) is left out.
    """
    departs = np.abs(values - judge) > PARITY_RATIO * rounding
    start = float(np.median(np.abs(values - judge)[departs]))
    left: dict[str, float] = {}
    for hypothesis in asked:
        changed = [replace(one, prompt_ids=hypothesis.prompt(one.prompt_ids)) for one in completions]
        try:
            imposed = rescore(changed, hypothesis.variation)
        except ParityError:
            continue
        left[hypothesis.name] = float(np.median(np.abs(values - imposed)[departs])) / start
    facts = {"tokens that depart": int(departs.sum()), "median |d| of those": start}
    best = min(left, key=left.__getitem__, default=None)
    if best is None or left[best] > EXPLAINED:
        return LogprobFinding(
            name="unexplained", leg=leg, message="no hypothesis about tokens or precision explains it",
            evidence={**facts, **{f"share left by {name}": share for name, share in left.items()}},
            hint="--explain audits the layers on the sequences that disagree most",
        )  # fmt: skip
    cause = next(hypothesis for hypothesis in asked if hypothesis.name == best)
    tied = [name for name, share in left.items() if name != best and share <= TIED * left[best]]
    evidence = {**facts, "share left": left[best], **({"tied with": ", ".join(tied)} if tied else {})}
    return LogprobFinding(
        name=cause.name, leg=leg, message=cause.message, evidence=evidence, hint=cause.hint,
        settings={} if leg == TRAINER else dict(cause.settings),
    )  # fmt: skip
