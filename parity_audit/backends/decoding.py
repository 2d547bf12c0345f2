"""Cached decoding: run the prompt at once or in chunks, then decode steps with the KV cache, and record it like one run.

The tensors that a site shows in the steps are joined along the positions, so that they can be compared with a run of the whole
text. If a program shows every cached key in every step, only the keys of the new tokens are kept.
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

    If rows are padded, `mask` `[batch so_far]` is 1 at real tokens, those of earlier steps included, and `positions`
    `[batch new]` count real tokens only. Both are None if no row is padded, as in a user's plain call. `length` is the number
    of tokens of a row after the last step.
    """

    tokens: Tensor
    length: int
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def padding(self) -> dict[str, Tensor]:
        """The arguments that describe the padding to a transformers model; empty if no row is padded."""
        given = {"attention_mask": self.mask, "position_ids": self.positions}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


Step = Callable[[StepInputs], Any]
"""Runs the model on more tokens, keeps its cache to itself, and returns what the model returned."""


@dataclass
class StepRecorder(Recorder):
    """Keeps the part of each site that each step shows, and writes the joined sites at the end."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def steps(self, device: str) -> Iterator[StepInputs]:
        """Yield the inputs of each step: the prompt, whole or in chunks, then `probe.at_once` tokens, then one token at a time."""
        whole = self.request
        stops = stops_of(whole)
        for start, stop in zip((0, *stops), stops, strict=False):
            self.request = replace(whole, probe=whole.probe.columns(start, stop))
            self.seen.clear()
            yield inputs_of(whole.probe, device, start, stop)
        self.request = whole

    def keep(self, site: str, canonical: Tensor) -> None:
        """Keep the part of a site `[batch pos ...]` that belongs to this step's tokens; only the first tensor of a step counts.

        Raises:
            ValueError: the tensor has fewer than three axes.
        """
        if canonical.ndim < 3:
            raise ValueError(f"{site} of a step is {list(canonical.shape)}, not [batch, pos, ...]")
        if site not in self.seen:
            self.seen.add(site)
            parts, new = self.parts.setdefault(site, []), self.request.probe.shape[1]
            so_far = new + sum(part.shape[1] for part in parts)
            stop = min(canonical.shape[1], so_far)  # a cache of fixed length has empty places after this
            parts.append(canonical[:, stop - new : stop].detach().to("cpu", torch.float32, copy=True))

    def reply(self) -> RunReply:
        """Write the joined sites and return the reply of the run."""
        for site, parts in self.parts.items():
            self.write(site, torch.cat(parts, dim=1))
        return super().reply()


def inputs_of(probe: Probe, device: str, start: int = 0, stop: int | None = None) -> StepInputs:
    """Return the inputs of a step over the positions from `start` to `stop` (exclusive), by default of a whole run."""
    tokens, length = positions.tokens(probe.columns(start, stop), device), probe.shape[1]
    if positions.mask(probe, device) is None:
        return StepInputs(tokens=tokens, length=length)
    so_far = probe.columns(0, stop)
    counted = positions.position_ids(so_far, device)
    return StepInputs(tokens=tokens, length=length, mask=positions.mask(so_far, device), positions=counted[:, start:])


def stops_of(request: RunRequest) -> list[int]:
    """Return the position (exclusive) at which each step ends."""
    length = request.probe.shape[1]
    prompt = request.probe.decode_from if request.cached and request.probe.decode_from is not None else length
    chunks = range(request.chunk, prompt, request.chunk) if request.chunk else ()
    return [*chunks, prompt, *range(prompt + request.probe.at_once, length + 1)]


def decode(request: RunRequest, root: nn.Module, step: Step, device: str) -> RunReply:
    """Run a probe in steps on a model with module hooks.

    If the program cannot continue from its cache, the reply says why and the probe counts as not tested.
    """

    def watching(recorder: Recorder, inputs: StepInputs) -> Any:
        with hooked(root, recorder), watched(root, recorder):
            return step(inputs)

    return stepped(request, watching, device)


def stepped(request: RunRequest, run: Callable[[Recorder, StepInputs], Any], device: str) -> RunReply:
    """Run a probe in steps, like `decode`, with a program that shows each step to the recorder in its own way.

    An error becomes a reply without sites. Unless the program said that it has no cache (see `says_no_cache`), the error counts
    as an error of its cached decoding, in `RunReply.raised`. Running out of memory is raised as it is.

    Args:
        request: the run, with the probe.
        run: runs one step, shows its sites to the recorder, and returns what the model returned.
        device: where the tokens go.
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
    """Whether a program said that it has no cache, by a `raise NotImplementedError` statement in its own code.

    torch raises NotImplementedError too, if it lacks a kernel for a dtype or device. Such an error comes from a call into
    torch's compiled code or from torch's own Python code, so the last frame is not at a `raise` of the program.
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
    """Return the reply of a program that did not decode the probe, because it has no cache or because it `raised` an error."""
    gap = NotTested(what=f"cached decoding (probe {probe.name})", why=why)
    return RunReply(entries=(), not_tested=(gap,), raised=f"{gap.what}: {why}" if raised else "")
