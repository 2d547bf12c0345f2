"""The interface of a backend: seven methods. Everything specific to a model arrives as data (taps, reads, edits)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest


class Tell(Protocol):
    """Reports the progress of a long step: a text, and how many of how many items are `done`, if that is known."""

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None: ...


REGISTRY = {
    "hf": "parity_audit.backends.hf:HfBackend",
    "hooked_transformer": "parity_audit.backends.hooked_transformer:HookedTransformerBackend",
    "transformer_bridge": "parity_audit.backends.transformer_bridge:TransformerBridgeBackend",
    "nnsight": "parity_audit.backends.nnsight:NnsightBackend",
    "vllm": "parity_audit.backends.vllm:VllmBackend",
    "sglang": "parity_audit.backends.sglang:SglangBackend",
    "sglang_server": "parity_audit.backends.sglang_server:SglangServer",
    "served": "parity_audit.backends.served:ServedBackend",
    "spec": "parity_audit.backends.spec:SpecBackend",
    "python": "parity_audit.backends.python_port:PythonPort",
}
CONFIG_TABLES = {
    "hf": "parity_audit.backends.config_tables:ParsedConfigs",
    "hooked_transformer": "parity_audit.backends.config_tables:HookedTransformerTable",
    "transformer_bridge": "parity_audit.backends.config_tables:BridgeConfigs",
    "vllm": "parity_audit.backends.config_tables:VllmConfigs",
}
"""Classes that return an engine's own config of released models, for engines that derive more than the config.json says."""


class Backend(Protocol):
    """A program that runs the model, seen from inside its worker."""

    def prepare(self, request: LoadRequest) -> None:
        """Import what `load` will need, before there is memory for the model itself. The parent need not call this."""

    def load(self, request: LoadRequest) -> None:
        """Load the checkpoint; errors of the engine are not caught."""

    def describe(self) -> Description:
        """Return versions and effective settings, read from live modules."""

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Fingerprint tensors of the live model, in the checkpoint's layout."""

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one probe and write the sites that `request.taps` name."""

    def replay(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one probe with `request.inputs` replacing sites; raises NotImplementedError where impossible."""

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Undo earlier edits, make exactly these, and return the values that the live model holds before and after."""


class Samples(Protocol):
    """The additional method of a backend that generates text: the engine's side of `parity-audit logprobs`."""

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Draw completions and return the log-probability of each drawn token."""


class Scoring(Protocol):
    """The additional method of a backend that scores given tokens.

    The trainer's side scores by teacher forcing, the engine's side by prefill.
    """

    def score(self, request: ScoreRequest, tell: Tell) -> ScoreReply:
        """Return the log-probabilities of the tokens of given completions."""
