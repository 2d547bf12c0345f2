"""Record and replace the query, key, scores, pattern and output of attention, whatever kernel computes them.

Rotated queries and keys, scores and pattern are local variables of the model's code, so module hooks do not see them. While an
attention module runs, a `TorchFunctionMode` sees the calls that consume them and interprets these calls as follows:

- The first product of two 4-D tensors is query @ key^T (eager attention). A `baddbmm` of `[batch*head ...]` tensors before
  any such product is query @ key^T too.
- The first product of two 4-D tensors after the softmax makes the output of each head.
- Softmax takes the scores and returns the pattern. If a column of sinks is concatenated to the scores before the softmax, the
  scores are recorded without that column, and so is the pattern.
- `scaled_dot_product_attention` takes query and key. Scores and pattern are not visible then.

The recording therefore relies on how the port computes, and a port may compute the same function in another way. An operand
that does not have the axes of its site is recorded as not visible, and each recorded site carries the assumption
(`SiteTap.assumes`). Recording changes no number: the original function is called with the original arguments, unless a
replay replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity_audit.backends.row_blocks import MATMUL, SOFTMAX, whole
from parity_audit.backends.taps import ATTENTION, Recorder
from parity_audit.core.types import SiteTap

SDPA = {F.scaled_dot_product_attention}
BY_HEAD = {torch.baddbmm, Tensor.baddbmm}
CAT = {torch.cat, torch.concat}


class _Watch(TorchFunctionMode):
    """Hands the arguments and results of attention calls to the recorder while an attention module runs."""

    def __init__(self, recorder: Recorder, taps: dict[str, dict[str, SiteTap]]) -> None:
        super().__init__()
        self.recorder = recorder
        self.taps = taps
        self.inside: dict[str, SiteTap] | None = None
        self.keys_seen = self.scores_seen = self.pattern_seen = False
        self.sinks = 0

    def enter(self, name: str) -> None:
        self.inside, self.sinks = self.taps[name], 0
        self.keys_seen = self.scores_seen = self.pattern_seen = False

    def leave(self) -> None:
        if (
            self.inside is not None
            and "scores" in self.inside
            and self.inside["scores"].site not in self.recorder.entries
        ):
            self._hidden("scores", "pattern")
        self.inside = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside is None:
            return func(*args, **kwargs)
        if func in MATMUL and not self.keys_seen and _are_4d(args[:2]):
            query, key = self.query_key(args[0], args[1].transpose(2, 3))
            return func(query, key.transpose(2, 3), **kwargs)
        if func in BY_HEAD and not self.keys_seen and self._are_by_head(args[1:3]):
            return self._product_by_head(func, args, kwargs)
        if func in MATMUL and self.pattern_seen and _are_4d(args[:2]):
            return self._output(func(*args, **kwargs))
        if func in CAT and self.keys_seen and _joins_sinks(args):
            scores, sinks = args[0]
            self.sinks = sinks.shape[-1]
            return func([self.scores(scores), sinks], *args[1:], **kwargs)
        if func in SOFTMAX and args:
            return self._softmax(func, args, kwargs)
        if func in SDPA:
            given = {**dict(zip(("query", "key"), args, strict=False)), **kwargs}
            query, key = self.query_key(given.pop("query"), given.pop("key"))
            return self._output(func(query, key, *args[2:], **given))
        return func(*args, **kwargs)

    def _are_by_head(self, values: Sequence[Any]) -> bool:
        """Whether these are two 3-D tensors whose first axis can be `batch*head`, with the batch of this run."""
        batch = self.recorder.request.probe.shape[0]
        are_3d = len(values) == 2 and all(isinstance(value, Tensor) and value.ndim == 3 for value in values)
        return are_3d and values[0].shape[0] % batch == 0

    def _product_by_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `baddbmm`: the added tensor plus query @ key^T of `[batch*head q d]` and `[batch*head d k]`."""
        added, query, key, *rest = args
        batch = self.recorder.request.probe.shape[0]
        query, key = self.query_key(
            rearrange(query, "(batch head) q d -> batch head q d", batch=batch),
            rearrange(key, "(batch head) d k -> batch head k d", batch=batch),
        )
        query = rearrange(query, "batch head q d -> (batch head) q d")
        return func(added, query, rearrange(key, "batch head k d -> (batch head) d k"), *rest, **kwargs)

    def query_key(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Record the rotated query `[b head q d]` and key `[b head|kv_head k d]`, and return them or their replacements."""
        self.keys_seen = True
        assert self.inside is not None
        if self._fits("query", query):
            replaced = self.recorder.see(self.inside["query"], query)
            query = query if replaced is None else replaced
        if self._fits("key", key):
            key = self._key(self.inside["key"], key)
        return query, key

    def _key(self, tap: SiteTap, key: Tensor) -> Tensor:
        kv_heads = tap.sizes.get("kv_head", key.shape[1])
        held = _heads_held(key, kv_heads)
        if held is None:
            why = f"the attention is given {key.shape[1]} heads of keys, which are not {kv_heads} heads repeated"
            self.recorder.misses(tap, why)
            return key
        replaced = self.recorder.see(tap, key[:, [held.index(own) for own in range(kv_heads)]])
        return key if replaced is None else replaced[:, held]

    def _fits(self, take: str, value: Tensor) -> bool:
        """Whether the request asks for this site and the tensor has its axes, `[batch head pos ...]`, with all tokens of the run.

        If the site is asked for and the tensor does not fit, the site is recorded as not visible.
        """
        assert self.inside is not None
        if take not in self.inside:
            return False
        batch, length = self.recorder.request.probe.shape
        # In cached decoding the keys of earlier steps come before the keys of this step.
        is_cached = take == "key" and value.ndim == 4 and value.shape[0] == batch and value.shape[2] > length
        if is_cached or self._has_all_tokens(value):
            return True
        self.recorder.misses(
            self.inside[take],
            f"the attention computes with {list(value.shape)} here, not with {batch} x heads x {length} at once",
        )
        return False

    def _has_all_tokens(self, value: Tensor) -> bool:
        """Whether a tensor is `[batch head pos ...]` with all tokens of this run."""
        batch, length = self.recorder.request.probe.shape
        return value.ndim == 4 and (value.shape[0], value.shape[2]) == (batch, length)

    def scores(self, scores: Tensor) -> Tensor:
        """Record the masked scores `[b head q k]`, and return them or their replacement."""
        self.scores_seen = True
        if self.inside is None or not self._fits("scores", scores):
            return scores
        scores = whole(scores)
        replaced = self.recorder.see(self.inside["scores"], scores)
        return scores if replaced is None else _finite_rows(replaced, scores)

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.inside is not None
        scores = args[0] if self.scores_seen else self.scores(args[0])
        pattern = func(scores, *args[1:], **kwargs)
        # The scores came from an unknown product, so the next product of 4-D tensors is pattern @ value, not query @ key^T.
        if not self.keys_seen and self._has_all_tokens(pattern):
            self.keys_seen = True
            self._hidden("query", "key", why="the attention makes its scores by a product that is not followed")
        self.pattern_seen = self.keys_seen
        if self._fits("pattern", pattern):
            pattern = whole(pattern)
            keys, sinks = pattern.split([pattern.shape[-1] - self.sinks, self.sinks], dim=-1)
            replaced = self.recorder.see(self.inside["pattern"], keys)
            pattern = pattern if replaced is None else torch.cat([replaced, sinks], dim=-1)
        return pattern

    def _output(self, output: Tensor) -> Tensor:
        """Record the output of each head, `[b head q d]`, and return it or its replacement."""
        self.pattern_seen = False
        if not self._fits("output", output):
            return output
        assert self.inside is not None
        replaced = self.recorder.see(self.inside["output"], output)
        return output if replaced is None else replaced

    def _hidden(self, *takes: str, why: str = "the attention kernel does not show it") -> None:
        assert self.inside is not None
        for take in takes:
            if take in self.inside:
                self.recorder.misses(self.inside[take], why)


def _heads_held(key: Tensor, kv_heads: int) -> list[int] | None:
    """Return, for each head of repeated keys `[b head k d]`, the index of the model's own key head that it holds.

    Usually neighbouring heads hold the same key head. A port may instead repeat the whole list of key heads or share them
    unevenly; then heads with equal numbers hold the same key head. Returns None if there are not `kv_heads` different heads.
    """
    count = key.shape[1]
    consecutive = [head * kv_heads // count for head in range(count)]
    if count == kv_heads or (count % kv_heads == 0 and _equal(key[:, :: count // kv_heads][:, consecutive], key)):
        return consecutive
    firsts: list[int] = []
    held = []
    for head in range(count):
        known = (own for own, first in enumerate(firsts) if _equal(key[:, head], key[:, first]))
        held.append(next(known, len(firsts)))
        firsts += [head] if held[-1] == len(firsts) else []
    return held if len(firsts) == kv_heads else None


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _are_4d(values: Any) -> bool:
    return len(values) == 2 and all(isinstance(value, Tensor) and value.ndim == 4 for value in values)


def _joins_sinks(args: Any) -> bool:
    """Whether these are the arguments of a concatenation of scores `[b head q k]` with one more column `[b head q 1]`."""
    parts: Sequence[Any] = args[0] if args else ()
    if not _are_4d(parts):
        return False
    return bool(parts[0].shape[:3] == parts[1].shape[:3] and parts[1].shape[3] == 1)


def _finite_rows(replaced: Tensor, scores: Tensor) -> Tensor:
    """Return the replaced scores with every -inf set to the smallest number of the scores' dtype.

    The softmax of a row in which every key is masked must stay finite.
    """
    return torch.where(replaced.isneginf(), torch.finfo(scores.dtype).min, replaced)


@contextmanager
def watched(root: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Record every `attention:` tap of the request while the context is open."""
    taps: dict[str, dict[str, SiteTap]] = {}
    for tap in recorder.request.taps:
        if tap.take.startswith(ATTENTION):
            taps.setdefault(tap.module, {})[tap.take.removeprefix(ATTENTION)] = tap
    watch = _Watch(recorder, taps)
    with ExitStack() as stack:
        for name, wanted in taps.items():
            try:
                module = root.get_submodule(name)
            except AttributeError:
                for tap in wanted.values():
                    recorder.misses(tap, f"no module `{name}` here")
                continue
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: watch.enter(name)).remove)
            stack.callback(module.register_forward_hook(lambda *_: watch.leave()).remove)
        if taps:
            stack.enter_context(watch)
        yield
