"""The backend for any `nn.Module` that maps token ids to logits; a user's site map says where its sites are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from parity_audit.backends import positions
from parity_audit.backends.attention import watched
from parity_audit.backends.base import Tell
from parity_audit.backends.decoding import not_decoded
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, versions
from parity_audit.backends.modes import not_run
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.core.types import Description, NotTested, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

PADDING = ("attention_mask", "position_ids")


class PlainModule:
    """A module, called as `model(token_ids [batch pos])`, with `attention_mask` and `position_ids` if its forward takes them."""

    request: LoadRequest
    model: nn.Module

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def describe(self) -> Description:
        """Return versions and live knob values."""
        return Description(
            backend="python", package="torch", version=torch.__version__.partition("+")[0], versions=versions("torch"),
            settings=self.request.settings, not_run=not_run("module", self.request.settings),
            effective=effective(self.model, self.request.reads),
            numerics=numerics(next(self.model.parameters()).dtype),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one forward pass.

        A padded probe is not run, and is reported as not tested, if the module's forward takes no `attention_mask`. Cached
        decoding is never run, because a plain module has no known cache.
        """
        if request.in_steps:
            return not_decoded(request.probe, "no cache is known of a plain module")
        recorder = Recorder(request)
        device = self.request.device
        padding = {
            "attention_mask": positions.mask(request.probe, device),
            "position_ids": positions.position_ids(request.probe, device),
        }
        taken = _accepted(self.model, padding)
        if padding["attention_mask"] is not None and "attention_mask" not in taken:
            why = "the module's forward takes no attention_mask"
            return RunReply(entries=(), not_tested=(NotTested(what=f"probe {request.probe.name}", why=why),))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(hooked(self.model, recorder))
            stack.enter_context(watched(self.model, recorder))
            recorder.returns(self.model(positions.tokens(request.probe, device), **taken))
        return recorder.reply()

    replay = run

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make edits of the live model, at the paths that the site map gives."""
        return self.edits.bring_to(self.model, request.edits)


def _accepted(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that are not None and that the module's forward takes."""
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return {key: value for key, value in given.items() if value is not None and (anything or key in names)}
