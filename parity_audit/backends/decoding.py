"""Cached decoding: the prompt at once or in chunks, then tokens from the cache, seen as if it were one run.

What a site shows in each step is joined along the positions, so that it can be compared with a whole run. Programs that
hand over every cached key in every step are asked for those of the new tokens only.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends import positions
from parity_audit.backends.attention import watched
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.core.types import NotTested, Probe
from parity_audit.core.wire import RunReply, RunRequest

RAISE = dis.opmap["RAISE_VARARGS"]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The tokens of one step, `[batch new]`.

    Where rows are padded, `mask` `[batch so_far]` is 1 at real tokens, those of earlier steps included, and `positions`
    `[batch new]` count these alone. Both are None where no row is: that is the path a user takes. `length`: tokens of a row when
    the last step is done.
    """

    tokens: Tensor
    length: int
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def padding(self) -> dict[str, Tensor]:
        """What models of transformers are told of the padding."""
        given = {"attention_mask": self.mask, "position_ids": self.positions}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


Step = Callable[[StepInputs], Any]
"""Runs the model on more tokens, keeps its cache to itself, and returns what the model returned."""


@dataclass
class StepRecorder(Recorder):
    """Keeps what a site shows in each step, and writes the sites at the end."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def steps(self, device: str) -> Iterator[StepInputs]:
        """What each step is given: the prompt, whole or in chunks, then one column at a time, or some at once first."""
        whole = self.request
        stops = stops_of(whole)
        for start, stop in zip((0, *stops), stops, strict=False):
            self.request = replace(whole, probe=whole.probe.columns(start, stop))
            self.seen.clear()
            yield inputs_of(whole.probe, device, start, stop)
        self.request = whole

    def keep(self, site: str, canonical: Tensor) -> None:
        """The part of a site `[batch pos ...]` that belongs to this step's tokens."""
        if canonical.ndim < 3:
            raise ValueError(f"{site} of a step is {list(canonical.shape)}, not [batch, pos, ...]")
        if site not in self.seen:
            self.seen.add(site)
            parts, new = self.parts.setdefault(site, []), self.request.probe.shape[1]
            so_far = new + sum(part.shape[1] for part in parts)
            stop = min(canonical.shape[1], so_far)  # behind that a cache of a fixed length is empty
            parts.append(canonical[:, stop - new : stop].detach().to("cpu", torch.float32, copy=True))

    def reply(self) -> RunReply:
        """The joined sites, written."""
        for site, parts in self.parts.items():
            self.write(site, torch.cat(parts, dim=1))
        return super().reply()


def inputs_of(probe: Probe, device: str, start: int = 0, stop: int | None = None) -> StepInputs:
    """What a step over the columns from `start` up to `stop` is given; by default a whole run."""
    tokens, length = positions.tokens(probe.columns(start, stop), device), probe.shape[1]
    if positions.mask(probe, device) is None:
        return StepInputs(tokens=tokens, length=length)
    so_far = probe.columns(0, stop)
    counted = positions.position_ids(so_far, device)
    return StepInputs(tokens=tokens, length=length, mask=positions.mask(so_far, device), positions=counted[:, start:])


def stops_of(request: RunRequest) -> list[int]:
    """Where each step ends, in positions."""
    length = request.probe.shape[1]
    prompt = request.probe.decode_from if request.cached and request.probe.decode_from is not None else length
    chunks = range(request.chunk, prompt, request.chunk) if request.chunk else ()
    return [*chunks, prompt, *range(prompt + request.probe.at_once, length + 1)]


def decode(request: RunRequest, root: nn.Module, step: Step, device: str) -> RunReply:
    """Run a probe in steps. A program that cannot go on from its cache says why, and the probe is not tested."""

    def watching(recorder: Recorder, inputs: StepInputs) -> Any:
        with hooked(root, recorder), watched(root, recorder):
            return step(inputs)

    return stepped(request, watching, device)


def stepped(request: RunRequest, run: Callable[[Recorder, StepInputs], Any], device: str) -> RunReply:
    """Run a probe in steps with a program that shows each step to the recorder by means of its own, as `decode` does.

    A program without a cache says so (see `says_no_cache`); any other error is one of its decoding.
    """
    recorder = StepRecorder(request)
    try:
        with torch.no_grad():
            for inputs in recorder.steps(device):
                recorder.returns(run(recorder, inputs))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {first_line[:200]}"
        return not_decoded(request.probe, why, raised=not says_no_cache(error))
    return recorder.reply()


def says_no_cache(error: Exception) -> bool:
    """Whether a program said that it has no cache: a `raise NotImplementedError` in its own code.

    torch raises NotImplementedError too, for a kernel that it lacks in a dtype or on a device: from a call, not from a `raise`.
    """
    last = error.__traceback__
    if not isinstance(error, NotImplementedError) or last is None:
        return False
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    by_torch = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
    return frame.f_code.co_code[last.tb_lasti] == RAISE and not by_torch


def not_decoded(probe: Probe, why: str, raised: bool = False) -> RunReply:
    """The reply of a program that did not decode the probe, which has no cache or `raised` an error."""
    gap = NotTested(what=f"cached decoding (probe {probe.name})", why=why)
    return RunReply(entries=(), not_tested=(gap,), raised=f"{gap.what}: {why}" if raised else "")
