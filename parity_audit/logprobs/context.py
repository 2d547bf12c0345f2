"""What one comparison is about: the question, and the two programs that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parity_audit.capture.plan import AuditPlan
from parity_audit.capture.session import Session
from parity_audit.core.progress import Progress
from parity_audit.core.rollouts import Completion, Sampling, ScoreRequest, Variation
from parity_audit.logprobs import legs
from parity_audit.logprobs.attribution import Target
from parity_audit.logprobs.causes import RoundTrip, SpecialTokens
from parity_audit.logprobs.files.rollouts import Rollouts
from parity_audit.logprobs.meaning import policy
from parity_audit.logprobs.prompts import Prompts


@dataclass(frozen=True, kw_only=True)
class Context:
    """The question and the programs that answer it; without an engine the rollouts of a file are judged.

    `base` is how the trainer's side is run, `target` what switches are to explain, None where that is not asked;
    `asked` names the engine settings that the user chose and wants compared with their other value;
    `round_trip` is the checkpoint's tokenizer, there and back, None where it has none.
    """

    plan: AuditPlan
    engine: Session | None
    trainer: Session
    sampling: Sampling
    prompts: Prompts
    special: SpecialTokens
    defaults: dict[str, object]
    memory_bytes: int
    presets: tuple[str, ...]
    progress: Progress
    rollouts: Rollouts | None = None
    base: Variation = field(default_factory=Variation)
    target: Target | None = None
    asked: tuple[str, ...] = ()
    round_trip: RoundTrip | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures at which the trainer's side scores: 1 and the sampling temperature."""
        return tuple(dict.fromkeys((1.0, policy(self.sampling).temperature)))

    def scored(self, completions: Sequence[Completion], precision: str, variation: Variation) -> legs.Scored:
        """The trainer's side on these completions; `variation` is the whole of how it is run."""
        own = self.sampling
        cut = (own.top_p, own.top_k, policy(own).temperature) if own.truncates else None
        request = ScoreRequest(
            completions=tuple(completions), temperatures=self.temperatures, truncation=cut,
            memory_bytes=self.memory_bytes, precision=precision, variation=variation,
        )  # fmt: skip
        return legs.scored(self.trainer.score(request), self.temperatures, own)
