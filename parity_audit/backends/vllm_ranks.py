"""Audit a vLLM engine whose model is divided among several processes (ranks).

What each rank records is joined into what an unsharded engine would record.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from parity_audit.backends import vllm_rank
from parity_audit.backends.paths import NoSuchPath
from parity_audit.backends.rank_tensors import rank_tensor
from parity_audit.backends.shards import copy_differences, join_shards, rank_spans
from parity_audit.backends.sink import TENSOR, write_site
from parity_audit.backends.taps import Recorder, to_canonical
from parity_audit.backends.vllm_rank import Part, Shown
from parity_audit.backends.weight_fingerprints import canonical
from parity_audit.core.shards import SPLIT, SUM, WHOLE, RankShare, RankValue, of_rank
from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.core.types import Edit, ReadBack, SiteTap, WeightPrint, WeightTap
from parity_audit.core.wire import LoadRequest, RunReply, RunRequest, WeightsRequest
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.stored import CheckpointTensors

LARGEST = 1e30
"""Value that replaces infinity and NaN, which JSON cannot represent."""
VOCABULARY = ("embed", LOGITS)
"""Sites whose ranks hold ranges of token ids."""
KV_HEADS = "n_kv_heads"


class Ranks:
    """Runs, reads and edits the ranks of a running engine together."""

    def __init__(self, llm: Any, request: LoadRequest) -> None:
        self.llm, self.sizes, reads = llm, request.sizes, request.reads
        self.checkpoint = Path(request.checkpoint.path)
        self.ask(vllm_rank.prepare)
        self.facts: list[vllm_rank.Facts] = self.ask(vllm_rank.facts, reads)
        self.places = [fact.place for fact in self.facts]
        held = [(fact.place.rank, *fact.vocabulary) for fact in self.facts if fact.vocabulary and fact.place.stage == 0]
        self.vocabulary = tuple(span for span in held if span[1] < span[2])

    def ask(self, question: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of `vllm_rank` on every rank and return the results in order of rank."""
        answers: list[Any] = self.llm.collective_rpc(question, args=args)
        return answers

    def effective(self) -> tuple[dict[str, Any], tuple[RankValue, ...]]:
        """Return the live knob values as an unsharded engine has them, and the values in which ranks differ."""
        found: dict[str, Any] = {}
        differ: list[RankValue] = []
        for knob in dict.fromkeys(knob for fact in self.facts for knob in fact.effective):
            paths: dict[str, list[tuple[int, Any]]] = {}
            for fact in self.facts:
                for path, value in fact.effective.get(knob, {}).items():
                    paths.setdefault(path, []).append((fact.place.rank, value))
            differ += [
                _differing(knob, held) for held in paths.values() if any(value != held[0][1] for _, value in held)
            ]
            values = [self._of_all(knob, held[0][1]) for held in paths.values()]
            found[knob] = values[0] if list(paths) == [""] else values
        return found, tuple(differ)

    def _of_all(self, knob: str, value: Any) -> Any:
        """Return the value of a knob in an unsharded engine, from the value on one rank.

        Only the number of key-value heads has to be converted, because a rank reports its own. It is multiplied by the
        number of ranks, but at most by the number of these heads, since several ranks may hold copies of the same head.
        """
        if knob != KV_HEADS or not isinstance(value, int):
            return value
        return value * min(self.places[0].tensor_ranks, self.sizes[KV_HEADS])

    def run(self, request: RunRequest, recorder: Recorder, generate: Callable[[], int | None]) -> RunReply:
        """Run `generate`, record on every rank while it runs, and join what the ranks recorded.

        `generate` returns the number of prompt tokens from the prefix cache, None if the engine does not count them.
        """
        with self._folder(request.out) as folder:
            self.ask(vllm_rank.begin, replace(request, out=str(folder)), str(folder), self.sizes)
            try:
                cached = generate()
                shown: list[Shown] = self.ask(vllm_rank.finish)
            except BaseException:
                with suppress(Exception):  # the engine may have ended; its own error is raised below
                    self.ask(vllm_rank.stop)
                raise
            recorder.not_visible += _seen_by_none(shown)
            recorder.not_tested += list(
                dict.fromkeys(gap for one in shown for gap in one.not_tested if self._samples(one, shown))
            )
            shares = [self._see(recorder, tap, shown) for tap in request.taps]
            shares.append(self._returned(recorder, shown))
        facts = {**shown[0].largest, "cached_prompt_tokens": cached}
        return replace(recorder.reply(), facts=facts, shares=tuple(share for share in shares if share is not None))

    @staticmethod
    def _samples(one: Shown, shown: Sequence[Shown]) -> bool:
        """Whether the gaps that a rank reports are used: they are if it has sampled logits, or if no rank has any.

        Ranks that get no logits would otherwise report these as not tested, although another rank has them.
        """
        return RETURNED in one.parts or all(RETURNED not in other.parts for other in shown)

    def _see(self, recorder: Recorder, tap: SiteTap, shown: Sequence[Shown]) -> RankShare | None:
        """Record the joined site, and return what each rank held of it; None if no rank recorded it."""
        held = self._parts(tap.site, shown)
        if not held:
            return None
        ranks, parts, tensors = zip(*held, strict=True)
        cuts = [part.cut for part in parts]
        recorder.see(tap, join_shards(tensors, cuts))
        if tap.site not in recorder.entries:
            return None
        share = RankShare(
            probe=recorder.request.probe.name, site=tap.site, how=_how(parts[0]), ranks=ranks,
            apart=tuple(min(value, LARGEST) if value == value else LARGEST for value in copy_differences(tensors, cuts[0])),
        )  # fmt: skip
        if tap.site in VOCABULARY:
            share = replace(share, spans=self.vocabulary)
        if share.how == SPLIT:
            return replace(share, spans=_spans(tap, tensors, cuts, ranks, recorder))
        return _kept(recorder, share, tap, tensors) if share.differs else share

    def _returned(self, recorder: Recorder, shown: Sequence[Shown]) -> RankShare | None:
        held = self._parts(RETURNED, shown)
        if held:
            recorder.returns(held[0][2])
        return None

    def _parts(self, site: str, shown: Sequence[Shown]) -> list[tuple[int, Part, Tensor]]:
        """Return the parts of a site, in order of rank, from the first pipeline stage that recorded the site.

        Each item is `(rank, part, tensor)`; empty tensors are left out.
        """
        found: list[tuple[int, Part, Tensor]] = []
        having = [number for number, one in enumerate(shown) if site in one.parts]
        for number in having:
            if self.places[number].stage == self.places[having[0]].stage:
                part = shown[number].parts[site]
                value = load_file(part.file)[TENSOR]
                if value.numel():
                    found.append((self.places[number].rank, part, value))
        return found

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Yield fingerprints of parameters joined from all ranks, with what each rank holds if some part is wrong."""
        stored = CheckpointTensors(self.checkpoint)
        with self._folder(None) as folder:
            held: list[dict[str, Part]] = self.ask(vllm_rank.weights, request.taps, str(folder))
            by_path: dict[str, list[WeightTap]] = {}
            beside: dict[str, list[str]] = {}
            for tap in request.taps:
                by_path.setdefault(tap.path, []).append(tap)
                beside.setdefault(_fused(tap.path), []).append(tap.name)
            for path, taps in by_path.items():
                ranks = self._first_stage(path, held)
                if ranks:
                    parts = [load_file(held[rank][path].file)[TENSOR] for rank in ranks]
                    cuts = [held[rank][path].cut for rank in ranks]
                    known = {
                        name: value.float() for name in beside[_fused(path)] if (value := stored(name)) is not None
                    }
                    for tap in taps:
                        print_ = fingerprint(tap.name, canonical(join_shards(parts, cuts), tap))
                        yield replace(print_, ranks=rank_tensor(tap, ranks, parts, cuts, known))

    def _first_stage(self, path: str, held: Sequence[dict[str, Part]]) -> list[int]:
        """Return the ranks that hold a parameter; if several pipeline stages hold it, only those of the first stage."""
        having = [number for number, own in enumerate(held) if path in own]
        return [number for number in having if self.places[number].stage == self.places[having[0]].stage]

    def apply(self, edits: tuple[Edit, ...]) -> list[ReadBack]:
        """Bring every rank to exactly these edits.

        Raises:
            LookupError: one of the paths exists on none of the ranks that it is meant for. All edits are then undone.
        """
        answers: list[tuple[list[ReadBack], list[str]]] = self.ask(vllm_rank.apply, edits)
        for only, path in (of_rank(edit.path) for edit in edits):
            if all(path in without for rank, (_, without) in enumerate(answers) if only in (None, rank)):
                self.ask(vllm_rank.apply, ())
                raise NoSuchPath(f"`{path}` is on no rank")
        return list({item.path: item for answer, _ in reversed(answers) for item in answer}.values())

    @contextmanager
    def _folder(self, out: str | None) -> Iterator[Path]:
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=out))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _fused(path: str) -> str:
    """Return the path of the parameter that a path belongs to; for one expert it is the parameter of all experts."""
    return path.rpartition("[")[0] if path.endswith("]") else path


def _differing(knob: str, held: Sequence[tuple[int, Any]]) -> RankValue:
    return RankValue(knob=knob, ranks=tuple(rank for rank, _ in held), values=tuple(value for _, value in held))


def _seen_by_none(shown: Sequence[Shown]) -> list[Any]:
    """Return, for each site that no rank could record, one of the ranks' reasons."""
    known = {site for one in shown for site in one.parts}
    found = {item.site: item for one in shown for item in one.not_visible if item.site not in known}
    return list(found.values())


def _how(part: Part) -> str:
    return SUM if part.cut.summand else SPLIT if part.cut.sizes else WHOLE


def _spans(
    tap: SiteTap, tensors: Sequence[Tensor], cuts: Sequence[Any], ranks: Sequence[int], recorder: Recorder
) -> tuple[tuple[int, int, int], ...]:
    """Return `(rank, start, stop)` for the parts of the third axis of a site that the ranks hold.

    Tensors filled with the number of their rank are joined and laid out in the same way as the ranks' values.
    """
    numbers = [torch.full((1, 1, *value.shape[2:]), float(rank)) for rank, value in zip(ranks, tensors, strict=True)]
    sized = replace(tap, sizes={**tap.sizes, "b": 1, "p": 1}, scale=None)
    owner = to_canonical(join_shards(numbers, cuts), sized)
    along = owner.reshape(owner.shape[2], -1)[:, 0] if owner.ndim > 3 else owner.flatten()
    return rank_spans(along)


def _kept(recorder: Recorder, share: RankShare, tap: SiteTap, tensors: Sequence[Tensor]) -> RankShare:
    """Write each rank's own values of a site to files of the capture, and return the share with these files."""
    files = []
    batch, positions = recorder.request.probe.shape
    sized = replace(tap, sizes={**tap.sizes, "b": batch, "p": positions})
    for rank, value in zip(share.ranks, tensors, strict=True):
        entry = write_site(recorder.request, f"{tap.site}.rank-{rank}", to_canonical(value, sized), torch.float32)
        files.append(entry.file)
    return replace(share, files=tuple(files))
