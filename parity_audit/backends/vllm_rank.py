"""Functions that run inside each rank of a sharded vLLM engine; `collective_rpc` calls them on every rank.

A rank records its own part of every site, brings it to `[batch, pos, ...]` and writes it to a file; `vllm_ranks` joins
the parts. A rank has one model and at most one run at a time, so the state of both is kept in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parity_audit.backends import vllm_cuts, vllm_weights
from parity_audit.backends.edits import OPS, LiveEdits, preview
from parity_audit.backends.facts import numerics
from parity_audit.backends.paths import NoSuchPath, get, matches
from parity_audit.backends.shards import WHOLE, Shard, by_width
from parity_audit.backends.sink import TENSOR
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.text_model import paths_of_part, text_part
from parity_audit.backends.vllm_gather import StepGatherer
from parity_audit.backends.vllm_plants import PLANTS
from parity_audit.core.shards import of_rank
from parity_audit.core.sites import RETURNED
from parity_audit.core.types import EVERY, Edit, NotTested, NotVisible, ReadBack, SiteTap, WeightTap
from parity_audit.core.wire import RunRequest

EDITS = LiveEdits(ops={**OPS, **PLANTS})
RUNNING: list[Any] = []
"""The hooks, gatherer and recorder of the current run; empty if there is none."""
ELSEWHERE = "PPMissingLayer"
"""Class that vLLM puts in place of a layer that another stage of a pipeline runs."""


@dataclass(frozen=True)
class Part:
    """The file with this rank's part of a tensor, and how the part belongs to the whole tensor."""

    file: str
    cut: Shard


@dataclass(frozen=True)
class Shown:
    """What one rank recorded in a run.

    `largest` gives the largest numbers of requests and tokens in one step, and the number of steps.
    """

    parts: dict[str, Part]
    not_visible: tuple[NotVisible, ...]
    not_tested: tuple[NotTested, ...]
    largest: dict[str, int]


@dataclass(frozen=True)
class Place:
    """Which rank this is.

    `tensor_rank` is its number among the `tensor_ranks` ranks that share its layers. `stage` is the number of its stage
    among the `stages` of the pipeline, and decides which layers it holds.
    """

    rank: int
    tensor_rank: int
    tensor_ranks: int
    stage: int
    stages: int


@dataclass(frozen=True)
class Facts:
    """What a rank reports about itself.

    `effective` holds live knob values, `attention` the attention kernel, and `vocabulary` the range of token ids whose
    embeddings it holds.
    """

    place: Place
    effective: dict[str, Any]
    numerics: dict[str, Any]
    parameters: int
    attention: str | None
    vocabulary: tuple[int, int] | None
    text_paths: dict[str, str]


@dataclass
class PartRecorder(Recorder):
    """Writes this rank's part of each site to a file, in the layout of the module."""

    model: nn.Module = field(default_factory=nn.Module)
    folder: Path = Path()
    sizes: dict[str, int] = field(default_factory=dict)
    ranks: int = 1
    parts: dict[str, Part] = field(default_factory=dict)

    def _see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        cut = self._cut(tap, native)
        if cut is None:
            held = [*native.shape[2:]]
            self.misses(
                tap, f"each rank holds {held} per token, which is no {self.ranks}th part of the site and not all of it"
            )
        else:
            self._leave(tap.site, native, cut)
        return None

    def _cut(self, tap: SiteTap, native: Tensor) -> Shard | None:
        """Return how this rank's tensor is a part of the site, from the module or else from the width of the tensor."""
        module = get(self.model, tap.module) if tap.module else self.model
        own = vllm_cuts.of_activation(module, given=tap.take.startswith("input"))
        if own is not None:
            return own
        return by_width(native.shape, tap.site, self.sizes, self.ranks) if tap.module else WHOLE

    def write(self, site: str, canonical: Tensor) -> None:
        """Write a site that is whole on every rank that has it."""
        self._leave(site, canonical, WHOLE)

    def returns(self, value: Any) -> None:
        """Write the logits that the engine sampled from."""
        if isinstance(value, Tensor):
            self._leave(RETURNED, value, WHOLE)

    def _leave(self, site: str, value: Tensor, cut: Shard) -> None:
        if site not in self.parts:
            self.parts[site] = Part(_saved(self.folder / f"{site}.safetensors", value), cut)


class RankGatherer(StepGatherer):
    """A gatherer that accepts None as logits, since some ranks get no logits."""

    def forced(self, out: Tensor | None) -> Any:
        return None if out is None else super().forced(out)


def prepare(worker: Any) -> None:
    """Allocate the buffers for the tensors that a later pipeline stage receives.

    vLLM allocates them while it warms up, but on a CPU it skips the warm-up.
    """
    runner = worker.model_runner
    if not hasattr(worker.get_model(), "make_empty_intermediate_tensors") or _place().stage == 0:
        return
    if getattr(runner, "intermediate_tensors", False) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def begin(worker: Any, request: RunRequest, folder: str, sizes: dict[str, int]) -> None:
    """Set hooks on this rank's modules, which record until `finish` or `stop` is called.

    Args:
        worker: vLLM's worker of this rank.
        request: the run. Taps that name no module are used on the last pipeline stage only.
        folder: where this rank makes a folder for its files.
        sizes: the sizes of the model, from which the widths of whole sites are computed.
    """
    stop(worker)
    model, place = text_part(worker.get_model()), _place()
    own = Path(folder) / f"rank-{place.rank}"
    own.mkdir(parents=True, exist_ok=True)
    taps = tuple(replace(tap, slice=None) for tap in request.taps if tap.module or place.stage == place.stages - 1)
    request = replace(request, taps=taps)
    recorder = PartRecorder(request, model=model, folder=own, sizes=sizes, ranks=place.tensor_ranks)
    gatherer = RankGatherer(request, recorder)
    stack = ExitStack()
    try:
        stack.enter_context(gatherer.steps_seen(worker.get_model()))
        stack.enter_context(hooked(model, gatherer, worker.get_model()))
        stack.enter_context(gatherer.sampler_seen(model, forced=request.cached))
    except BaseException:
        stack.close()
        raise
    RUNNING.append((stack, gatherer, recorder))


def finish(worker: Any) -> Shown:
    """Remove the hooks, compute the logits of every kept position, and return what was recorded."""
    stack, gatherer, recorder = RUNNING.pop()
    stack.close()
    model = text_part(worker.get_model())
    device = next(model.parameters()).device
    with torch.no_grad():
        gatherer.finish(lambda hidden: _logits(model, hidden.to(device)))
    return Shown(recorder.parts, tuple(recorder.not_visible), tuple(recorder.not_tested), gatherer.largest)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the model's own logits, or a tensor without columns on a rank that gets no logits."""
    out: Tensor | None = model.compute_logits(hidden)
    return hidden.new_zeros(len(hidden), 0) if out is None else out


def stop(worker: Any) -> None:
    """Remove the hooks of the current run, if there is one."""
    while RUNNING:
        RUNNING.pop()[0].close()


def facts(worker: Any, reads: dict[str, str]) -> Facts:
    """Return what this rank holds and how it computes; `reads` maps each knob to the path of its live value."""
    model = text_part(worker.get_model())
    return Facts(
        place=_place(), effective=_effective(model, reads), numerics=numerics(next(model.parameters()).dtype),
        parameters=vllm_weights.parameter_count(model), attention=attention_kernel(model),
        vocabulary=vllm_cuts.vocabulary(model), text_paths=paths_of_part(worker.get_model()),
    )  # fmt: skip


def attention_kernel(model: nn.Module) -> str | None:
    """Return the engine's name of the attention kernel in force, None if no module names one."""
    modules: list[Any] = list(model.modules())
    kernels = (module.attn_backend.get_name() for module in modules if hasattr(module, "attn_backend"))
    return next(kernels, None)


def _effective(model: nn.Module, reads: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the live values of each knob by path.

    A path with `[*]` gives one value for each layer that this rank has. A path without it gives one value, under an
    empty key.
    """
    found: dict[str, dict[str, Any]] = {}
    for knob, path in reads.items():
        try:
            values = {at: preview(value) for at, value in _present(model, path)}
        except LookupError:
            continue
        if values:
            found[knob] = values if EVERY in path else {"": next(iter(values.values()))}
    return found


def _present(model: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the same as `matches`, but without the layers that other pipeline stages hold."""
    head, every, tail = path.partition(EVERY)
    if not every:
        yield from matches(model, path)
        return
    for number, item in enumerate(get(model, head)):
        if type(item).__name__ != ELSEWHERE:
            yield from ((f"{head}[{number}].{at}", value) for at, value in matches(item, tail.removeprefix(".")))


def weights(worker: Any, taps: Sequence[WeightTap], folder: str) -> dict[str, Part]:
    """Write this rank's part of each parameter to a file, and return the parts by path in an unsharded engine.

    Paths that this rank does not have are left out.
    """
    model, own = text_part(worker.get_model()), Path(folder) / f"rank-{_place().rank}"
    own.mkdir(parents=True, exist_ok=True)
    out: dict[str, Part] = {}
    for path in dict.fromkeys(tap.path for tap in taps):
        try:
            here = vllm_cuts.local_path(model, path)
            value = vllm_weights.live_weight(model, here) if here else None
        except LookupError:
            continue
        if isinstance(value, Tensor):
            out[path] = Part(_saved(own / f"{len(out)}.safetensors", value), vllm_cuts.of_weight(model, path, value))
    return out


def apply(worker: Any, edits: tuple[Edit, ...]) -> tuple[list[ReadBack], list[str]]:
    """Bring this rank's model to exactly these edits.

    Edits of other ranks, and of layers that other pipeline stages hold, are ignored. Returns the values that were read
    back, and the paths of edits of this rank that its model does not have.
    """
    model, number = text_part(worker.get_model()), _place().rank
    own = of_this_rank(edits, number)
    return EDITS.bring_to(model, tuple(here for edit in own for here in _here(model, edit))), [
        edit.path for edit in own if not _has(model, edit.path)
    ]


def of_this_rank(edits: Sequence[Edit], rank: int) -> list[Edit]:
    """Return the edits for all ranks and those for this rank, with their paths in its model."""
    places = [(edit, *of_rank(edit.path)) for edit in edits]
    return [replace(edit, path=path) for edit, only, path in places if only in (None, rank)]


def _here(model: nn.Module, edit: Edit) -> list[Edit]:
    """Return the edit as it applies to this rank: an empty list if its model has no such path.

    If the rank lacks some layers, an edit of `[*]` becomes one edit for each layer that it has.
    """
    head, every, tail = edit.path.partition(EVERY)
    if not _has(model, edit.path):
        return []
    layers = list(get(model, head)) if every else []
    if all(type(item).__name__ != ELSEWHERE for item in layers):
        return [edit]
    values = (
        edit.value if isinstance(edit.value, list) and len(edit.value) == len(layers) else [edit.value] * len(layers)
    )
    return [
        replace(edit, path=f"{head}[{number}]{tail}", value=values[number])
        for number, item in enumerate(layers)
        if type(item).__name__ != ELSEWHERE
    ]


def _has(model: nn.Module, path: str) -> bool:
    try:
        return bool(list(_present(model, path)))
    except NoSuchPath:
        return False


def _saved(path: Path, value: Tensor) -> str:
    save_file({TENSOR: value.detach().to("cpu").contiguous()}, path)
    return str(path)


def _place() -> Place:
    from vllm.distributed import parallel_state

    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return Place(
        rank=parallel_state.get_world_group().rank, tensor_rank=tensor.rank_in_group, tensor_ranks=tensor.world_size,
        stage=pipeline.rank_in_group, stages=pipeline.world_size,
    )  # fmt: skip
