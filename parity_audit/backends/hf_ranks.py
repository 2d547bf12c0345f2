"""A transformers model split over several processes by its own tensor-parallel plan, with sites joined as if one process ran it.

This process holds no model. Each rank is a separate process that runs the ordinary backend on its part of the model and writes
its part of each site. This process joins the parts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parity_audit.backends.free_port import LOCALHOST, free_port
from parity_audit.backends.shards import Shard, by_width, copy_differences, join_shards
from parity_audit.backends.sink import TENSOR, write_site
from parity_audit.backends.taps import Recorder
from parity_audit.core.errors import BackendFailed
from parity_audit.core.shards import SPLIT, WHOLE, RankShare, of_rank
from parity_audit.core.sites import ATTENTION_SITES
from parity_audit.core.types import Description, NotVisible, ReadBack, SiteTap, WeightPrint
from parity_audit.core.wire import FLOAT64, ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

RANKS = "tp"
"""The setting with the number of processes over which the model is split."""
HEADS_AXIS = 1
"""Axis of the heads in attention matrices `[batch, head, query, key]`."""
CUT_AXES = ("head", "kv_head")
KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Ends of the names of the layers that compute keys."""
ENDING = 10.0
"""Seconds to wait for a killed rank to end."""


class HfRanks:
    """The processes, one per rank, that together run one model."""

    def __init__(self, request: LoadRequest, make: Callable[[], Any]) -> None:
        """Start one process per rank and load the model into them; `make` makes the backend of each process."""
        self.request, self.count = request, int(request.settings[RANKS])
        context, port = get_context("spawn"), free_port()
        self.wires: list[Connection] = []
        self.processes = []
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, make, rank, self.count, port), daemon=True)
            process.start()
            theirs.close()
            self.wires.append(ours)
            self.processes.append(process)
        self.ask("load", request)

    def ask(self, op: str, *args: Any) -> list[Any]:
        """Call the method `op` of every rank with `args`, and return the answers in order of rank.

        Raises:
            BackendFailed: a rank raised an error, or its process ended.
        """
        for wire in self.wires:
            wire.send((op, args))
        answers = []
        for rank, wire in enumerate(self.wires):
            try:
                good, answer = wire.recv()
            except EOFError:
                good, answer = False, "its process ended"
            if not good:
                self.close()  # the other ranks may wait forever for this one
                raise BackendFailed(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Kill the process of every rank."""
        for process in self.processes:
            process.kill()
            process.join(ENDING)

    def describe(self) -> Description:
        """Return the first rank's description, with the number of ranks added to its settings.

        Its parameter count is that of the whole model.
        """
        first: Description = self.ask("describe")[0]
        return replace(first, settings={**first.settings, RANKS: self.count})

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of whole parameters, gathered from all ranks."""
        yield from self.ask("weights", request)[0]

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Bring every rank to exactly these edits; return each edited path once, as read on the first rank that has it."""
        answers: list[list[ReadBack]] = self.ask("apply", request)
        return list({item.path: item for answer in reversed(answers) for item in answer}.values())

    def run(self, request: RunRequest) -> RunReply:
        """Run a probe on every rank and join their parts of each site.

        Raises:
            NotImplementedError: float64 or replaced sites were asked for.
        """
        if request.precision == FLOAT64 or request.inputs:
            raise NotImplementedError("a model that is cut over ranks cannot be the judge and takes no replaced sites")
        Path(request.out).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=request.out))
        recorder = Recorder(request)
        try:
            local = tuple(_local(tap, self.count) for tap in request.taps)
            replies: list[RunReply] = self.ask("run", replace(request, taps=local, out=str(folder)))
            first = replies[0]
            recorder.not_visible += first.not_visible
            recorder.not_tested += first.not_tested
            files = [
                {entry.site: folder / f"rank-{rank}" / entry.file for entry in reply.entries}
                for rank, reply in enumerate(replies)
            ]
            shares = [self._join(recorder, site, [held[site] for held in files]) for site in files[0]]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        reply = recorder.reply()
        return replace(
            reply, positions=first.positions, facts=first.facts, shares=tuple(share for share in shares if share)
        )

    def _join(self, recorder: Recorder, site: str, files: Sequence[Path]) -> RankShare | None:
        parts = [load_file(file)[TENSOR] for file in files]
        cut = self._cut(site, parts[0])
        if cut is None:
            held = list(parts[0].shape[2:])
            recorder.not_visible.append(
                NotVisible(
                    site=site, why=f"each rank holds {held} per token, which is no part of the site and not all of it"
                )
            )
            return None
        recorder.write(site, join_shards(parts, [cut] * self.count))
        return _share(recorder, site, parts, cut)

    def _cut(self, site: str, part: Tensor) -> Shard | None:
        if not site.endswith(ATTENTION_SITES):
            return by_width(part.shape, site, self.request.sizes, self.count)
        heads = part.shape[HEADS_AXIS]
        whole = heads == self.request.sizes["n_heads"]
        return Shard() if whole else Shard(axis=HEADS_AXIS, sizes=(heads,), copies=(1,))


def _share(recorder: Recorder, site: str, parts: Sequence[Tensor], cut: Shard) -> RankShare:
    """Return how a site was joined from the ranks' parts.

    If every rank should hold the whole site but their values differ, each rank's values are written to files too.
    """
    ranks, each = range(len(parts)), parts[0].shape[cut.axis] if cut.sizes else 0
    copies = cut.copies[0] if cut.copies else 1
    share = RankShare(
        probe=recorder.request.probe.name, site=site, how=SPLIT if cut.sizes else WHOLE, ranks=tuple(ranks),
        spans=tuple((rank, n * each, (n + 1) * each) for n, rank in enumerate(ranks[::copies])) if cut.sizes else (),
        apart=(0.0,) * len(parts) if site.endswith(ATTENTION_SITES) else tuple(copy_differences(parts, cut)),
    )  # fmt: skip
    if not share.differs or cut.sizes:
        return share
    entries = (
        write_site(recorder.request, f"{site}.rank-{rank}", part, torch.float32)
        for rank, part in zip(ranks, parts, strict=True)
    )
    return replace(share, files=tuple(entry.file for entry in entries))


def _local(tap: SiteTap, ranks: int) -> SiteTap:
    """Return a tap whose sizes have the number of heads of one rank."""
    sizes = {axis: max(1, size // ranks) if axis in CUT_AXES else size for axis, size in tap.sizes.items()}
    return replace(tap, sizes=sizes)


def serve(wire: Connection, make: Callable[[], Any], rank: int, ranks: int, port: int) -> None:
    """Run one rank with its own backend: answer requests until the wire closes, then end the process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=LOCALHOST, MASTER_PORT=str(port)
    )
    own = Rank(make(), rank, ranks)
    while True:
        try:
            op, args = wire.recv()
        except EOFError:
            os._exit(0)
        try:
            wire.send((True, getattr(own, op)(*args)))
        except BaseException as error:
            traceback.print_exc()
            wire.send((False, f"{type(error).__name__}: {error}"))


def require_whole_heads(plan: Mapping[str, str], sizes: Mapping[str, int], ranks: int) -> None:
    """Refuse a split that does not divide the key-value heads evenly, before it fails inside the model.

    transformers cannot copy key-value heads to several ranks.

    Raises:
        ValueError: the plan splits the keys, and the number of key-value heads is not a multiple of the number of ranks.
    """
    heads = sizes["n_kv_heads"]
    if heads % ranks and any(name.endswith(KEYS) for name in plan):
        most = max(count for count in range(1, heads + 1) if heads % count == 0 and count < ranks)
        raise ValueError(
            f"transformers cannot cut {heads} key-value heads over {ranks} ranks; {RANKS}={most} divides them"
        )


class Rank:
    """Runs the ordinary backend on one rank's part of a model."""

    def __init__(self, backend: Any, rank: int, ranks: int) -> None:
        self.backend, self.rank, self.ranks = backend, rank, ranks

    def load(self, request: LoadRequest) -> None:
        """Load this rank's part by the tensor-parallel plan that transformers has for the model.

        If the vocabulary is not a multiple of the number of ranks, every rank gets the whole head.
        """
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

        settings = {key: value for key, value in request.settings.items() if key != RANKS}
        divides = request.sizes["d_vocab"] % self.ranks == 0
        plan: dict[str, Any] = {} if divides else {"tp_plan": {"lm_head": "replicated_with_grad_allreduce"}}
        how = DistributedConfig(tp_size=self.ranks, **plan)
        self.backend.load(replace(request, settings=settings), distributed_config=how)
        require_whole_heads(getattr(self.backend.model, "tp_plan", None) or {}, request.sizes, self.ranks)
        head: Any = self.backend.model.get_output_embeddings()
        if not divides and hasattr(head.weight, "full_tensor"):
            head.weight = nn.Parameter(head.weight.full_tensor(), requires_grad=False)

    def describe(self) -> Description:
        """Return the backend's description of itself."""
        about: Description = self.backend.describe()
        return about

    def run(self, request: RunRequest) -> RunReply:
        """Run a probe and write its sites to this rank's own folder."""
        own = replace(request, out=str(Path(request.out) / f"rank-{self.rank}"))
        reply: RunReply = self.backend.run(own, lambda *_: None)
        return reply

    def weights(self, request: WeightsRequest) -> list[WeightPrint]:
        """Return fingerprints of whole parameters. Every rank has to call this, because it gathers parts from all ranks."""
        return list(self.backend.weights(request))

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make the edits for every rank and those for this rank only, and return the values before and after."""
        places = [(edit, *of_rank(edit.path)) for edit in request.edits]
        own = tuple(replace(edit, path=path) for edit, only, path in places if only in (None, self.rank))
        read_back: list[ReadBack] = self.backend.apply(replace(request, edits=own))
        return read_back
