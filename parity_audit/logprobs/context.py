"""The resolved question of one comparison, and the sessions of the two programs that are compared."""

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
    """The question and the programs that are compared; if `engine` is None, the rollouts of a file are compared.

    `base` is how the trainer's side is run. `target` is what the switches have to explain, None if no attribution was asked
    for. `asked` names the engine settings that the user chose and that are compared with their other value. `round_trip`
    decodes token ids with the checkpoint's tokenizer and encodes the text again; None if the checkpoint has no tokenizer.
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
        """Return the temperatures at which the trainer's side scores: 1 and the sampling temperature."""
        return tuple(dict.fromkeys((1.0, policy(self.sampling).temperature)))

    def scored(self, completions: Sequence[Completion], precision: str, variation: Variation) -> legs.Scored:
        """Score these completions on the trainer's side; `variation` replaces `base`, and is not added to it."""
        own = self.sampling
        cut = (own.top_p, own.top_k, policy(own).temperature) if own.truncates else None
        request = ScoreRequest(
            completions=tuple(completions), temperatures=self.temperatures, truncation=cut,
            memory_bytes=self.memory_bytes, precision=precision, variation=variation,
        )  # fmt: skip
        return legs.scored(self.trainer.score(request), self.temperatures, own)
