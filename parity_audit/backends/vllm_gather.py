"""Convert a serving engine's flat tokens back to `[batch, pos]`, and replacements of sites from there to flat tokens.

vLLM and SGLang put the tokens of all requests of a batch on one axis, without padding, and run them in as many steps as
the scheduler chooses. Each step gets the ids and positions of its tokens (`input_ids`, `positions`). That is enough to
find the row and column of every token, whatever the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends.sink import read_input
from parity_audit.backends.taps import Recorder, from_canonical
from parity_audit.core.types import NotTested, Probe, SiteTap
from parity_audit.core.wire import RunRequest

Head = Callable[[Tensor], Tensor]
COMPUTE_LOGITS = "compute_logits"
LOGITS_ROWS = 1024
"""Tokens whose logits are computed at a time."""
FORBIDDEN = -1e4
"""Logit of every token that a request must not sample."""
SAMPLER = "the logits that the engine samples from"
ELSEWHERE = NotTested(
    what=f"{SAMPLER}, at other positions than the last of a step",
    why="the engine computes none there: the model's own head on the final norm's output was compared instead",
)


@contextmanager
def hooks_of_the_whole(model: nn.Module) -> Iterator[None]:
    """Make direct calls of `model.forward` run the hooks of `model` while the context is open.

    A direct call skips the hooks of the module. SGLang calls `forward` in this way, and so does a class that vLLM would
    compile as a whole (ERNIE 4.5), in eager mode as well.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        del model.forward
        try:
            return nn.Module.__call__(model, *args, **kwargs)
        finally:
            model.forward = forward

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """The tokens `[start, stop)` of a step, which are the tokens `[first, first + stop - start)` of the row `row`."""

    row: int
    first: int
    start: int
    stop: int


def place(
    ids: Sequence[int], positions: Sequence[int], rows: Sequence[Sequence[int]], done: list[int]
) -> list[TokenSpan]:
    """Return which tokens of a step belong to which rows, and add them to the computed tokens of each row in `done`.

    A row can only continue at its first token that was not computed yet. If several rows match the next tokens, the row
    that matches most of them is taken, and the first one of equal matches: vLLM schedules requests in the order in
    which they come, and equal rows are interchangeable. Tokens that match no row (padding of a step) are skipped.
    `Gatherer.finish` raises if tokens of a row are missing in the end.
    """
    pieces: list[TokenSpan] = []
    start = 0
    while start < len(ids):
        matched = [_matched(ids, positions, start, row, done[number]) for number, row in enumerate(rows)]
        longest = max(matched, default=0)
        if longest == 0:
            start += 1
            continue
        number = matched.index(longest)
        pieces.append(TokenSpan(row=number, first=done[number], start=start, stop=start + longest))
        done[number] += longest
        start += longest
    return pieces


def _matched(ids: Sequence[int], positions: Sequence[int], start: int, row: Sequence[int], first: int) -> int:
    """Return how many tokens of the step, from `start` on, equal the tokens of this row from `first` on."""
    count = 0
    while (
        first + count < len(row) and start + count < len(ids)
        and positions[start + count] == first + count and ids[start + count] == row[first + count]
    ):  # fmt: skip
        count += 1
    return count


def real_rows(probe: Probe) -> list[list[int]]:
    """Return the rows of a probe without their padding, as they are given to the engine."""
    return [
        [token for token, real in zip(*row, strict=False) if real]
        for row in zip(probe.token_ids, probe.mask, strict=False)
    ]


def prompts_of(request: RunRequest, rows: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Return the prompt of each row, and how many tokens are decoded after it.

    The number of decoded tokens is the same in all rows, since rows that are padded on the left end at the same
    position.
    """
    first = request.probe.decode_from
    decoded = request.probe.shape[1] - first if request.cached and first is not None else 0
    return [row[: len(row) - decoded] for row in rows], decoded


def token_axis(tap: SiteTap) -> int:
    """Return the token axis of an engine's tensor: the axis `b` in the site's layout, or the first axis without `b`."""
    axes = tap.layout.partition("->")[0].split()
    return axes.index("b") if "b" in axes else 0


def _as_in_layout(value: Tensor, axis: int) -> Tensor:
    """Return `[batch, pos, ...]` with its first two axes moved to `axis` and `axis + 1`."""
    return value.movedim((0, 1), (axis, axis + 1)) if axis else value


@dataclass
class StepGatherer:
    """Collects the tokens of each site over the steps of an engine, and records a site when it is complete.

    `taps.hooked` uses it in place of a `Recorder`. `pieces` and `tokens` describe the current step, `done` counts the
    computed tokens of each row, `parts` holds sites that are not complete, `pending` lists sites that `finish` records,
    and `sampled` maps (row, column) to the logits that the engine sampled from. `skipped` is the number of tokens that
    came from the prefix cache, and `largest` what the scheduler did at most in one step.
    """

    request: RunRequest
    inner: Recorder
    pieces: list[TokenSpan] = field(default_factory=list)
    tokens: int = 0
    parts: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    pending: list[SiteTap] = field(default_factory=list)
    sampled: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    skipped: int = 0
    largest: dict[str, int] = field(default_factory=lambda: {"requests_per_step": 0, "tokens_per_step": 0, "steps": 0})

    def __post_init__(self) -> None:
        self.rows = real_rows(self.request.probe)
        self.columns = [[column for column, real in enumerate(row) if real] for row in self.request.probe.mask]
        self.done = [0] * len(self.rows)

    def misses(self, tap: SiteTap, why: str) -> None:
        """See `Recorder.misses`."""
        self.inner.misses(tap, why)

    @contextmanager
    def steps_seen(self, model: nn.Module) -> Iterator[None]:
        """Call `before_step` at the start of every step of the whole model while the context is open."""
        past_hooks = type(model).__call__ is not nn.Module.__call__ and getattr(model, "do_not_compile", False)
        with hooks_of_the_whole(model) if past_hooks else nullcontext():
            hook = model.register_forward_pre_hook(self.before_step, with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()

    def before_step(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the whole model: find the rows that this step's tokens belong to."""
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        ids, positions = given["input_ids"], given["positions"]
        self.step(ids.tolist(), positions.tolist())

    def step(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Note that the engine starts a step with these token ids at these positions."""
        if self.request.keep_cache and not any(self.done):
            self.skipped = self.done[0] = int(positions[0])  # tokens from the prefix cache are not computed
        self.pieces = place(ids, positions, self.rows, self.done)
        self.tokens = len(ids)
        self._count()

    def _count(self) -> None:
        """Update the largest numbers of requests and tokens in one step, and the number of steps."""
        tokens = sum(piece.stop - piece.start for piece in self.pieces)
        top = self.largest
        top["requests_per_step"] = max(top["requests_per_step"], len(self.pieces))
        top["tokens_per_step"] = max(top["tokens_per_step"], tokens)
        top["steps"] += bool(tokens)

    def see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        """Copy this step's tokens `[token, ...]` of a site to their places in `[batch, pos, ...]`.

        The tokens are copied at once, because engines reuse buffers. Modules of transformers that vLLM runs have the
        tokens as a batch of one, `[1, token, ...]`. If the request replaces the site, the replacement is returned in
        the layout of the engine, else None.
        """
        path = self.request.inputs.get(tap.site)
        self._keep(tap, native)
        return None if path is None else self._replaced(tap, native, read_input(path))

    def _replaced(self, tap: SiteTap, native: Tensor, given: Tensor) -> Tensor:
        """Return this step's tensor of a site with its tokens replaced by those of `given` `[batch, pos, ...]`."""
        out, axis = native.clone(), token_axis(tap)
        tokens = self._by_token(out, axis)
        for piece in self.pieces:
            columns = self.columns[piece.row][piece.first : piece.first + piece.stop - piece.start]
            own = _as_in_layout(tokens[piece.start : piece.stop].clone()[None], axis)
            value = given[piece.row, columns][None].to(native)
            sized = replace(tap, sizes={**tap.sizes, "b": 1, "p": len(columns)})
            tokens[piece.start : piece.stop] = from_canonical(value, own, sized).movedim((axis, axis + 1), (0, 1))[0]
        return out

    def _by_token(self, native: Tensor, axis: int) -> Tensor:
        """Return a view `[token, ...]` of an engine's tensor.

        The tensor may also be `[1, token, ...]`, have one row per token and head, or have its tokens on another axis.
        """
        if axis:
            return native.movedim(axis, 0)
        if native.ndim > 2 and native.shape[:2] == (1, self.tokens):
            return native[0]
        if len(native) != self.tokens and len(native) % self.tokens == 0:
            by_token: Tensor = native.unflatten(0, (self.tokens, -1))
            return by_token
        return native

    def _keep(self, tap: SiteTap, native: Tensor) -> None:
        """Copy this step's tokens of a site into the whole site, and record the site if it is complete."""
        shape, native = list(native.shape), self._by_token(native, token_axis(tap))
        if len(native) < self.tokens:
            self.misses(tap, f"it holds {shape} in a step of {self.tokens} tokens")
            return
        if tap.slice is not None:
            native = native[..., tap.slice[0] : tap.slice[1]]
        if tap.site not in self.parts:
            self.parts[tap.site] = native.new_zeros((*self.request.probe.shape, *native.shape[1:]), device="cpu")
        whole = self.parts[tap.site]
        for piece in self.pieces:
            columns = self.columns[piece.row][piece.first : piece.first + piece.stop - piece.start]
            whole[piece.row, columns] = native[piece.start : piece.stop].detach().to("cpu")
            self.counts[tap.site] = self.counts.get(tap.site, 0) + len(columns)
        if self.counts.get(tap.site, 0) == sum(map(len, self.rows)) - self.skipped:
            self._record(replace(tap, slice=None))

    def _record(self, tap: SiteTap) -> None:
        if tap.take == COMPUTE_LOGITS:
            self.pending.append(tap)
        else:
            self.inner.see(tap, _as_in_layout(self.parts.pop(tap.site), token_axis(tap)))

    @contextmanager
    def sampler_seen(self, model: Any, *, forced: bool) -> Iterator[None]:
        """Keep the logits `[request, d_vocab]` of each step that the engine samples from, while the context is open.

        There is one row for the last token of each request. If `forced` is true, the engine samples the next token of
        each row of the probe, whatever the logits are.
        """

        def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = original(hidden, *args, **kwargs)
            self.sampled_from(out)
            return self.forced(out) if forced else out

        original = model.compute_logits
        model.compute_logits = compute_logits
        try:
            yield
        finally:
            del model.compute_logits

    def sampler(self, *, forced: bool) -> Callable[[Tensor], Tensor | None]:
        """Return a function that an engine calls with the logits of each step, and that keeps them.

        If `forced` is true, the function returns other logits, from which the engine has to sample; otherwise None.
        """

        def seen(out: Tensor) -> Tensor | None:
            self.sampled_from(out)
            return self.forced(out) if forced else None

        return seen

    def forced(self, out: Tensor) -> Tensor:
        """Return logits `[request d_vocab]` from which each request of this step samples the next token of its row."""
        chosen = torch.full_like(out, FORBIDDEN)
        for number, piece in enumerate(self.pieces[: len(out)]):
            row, done = self.rows[piece.row], self.done[piece.row]
            chosen[number, row[done] if done < len(row) else 0] = 0.0
        return chosen

    def sampled_from(self, out: Tensor | None) -> None:
        """Keep the logits `[request d_vocab]` that a step samples from: one row for the last token of each request."""
        if out is not None and len(out) == len(self.pieces):
            self.sampled |= {self._end(piece): row for piece, row in zip(self.pieces, out.detach().cpu(), strict=True)}

    def _end(self, piece: TokenSpan) -> tuple[int, int]:
        """Return the row and column of the last token of a piece."""
        return piece.row, self.columns[piece.row][piece.first + piece.stop - piece.start - 1]

    def finish(self, head: Head) -> None:
        """Record the logits at every position that the probe keeps; called after the engine has run all steps.

        `head` computes the engine's own logits `[token d_vocab]` of final-norm outputs `[token d_model]`. It is applied
        to slices, so that only one copy of the logits exists.

        Raises:
            RuntimeError: the engine did not run every token of the probe.
        """
        missing = sum(map(len, self.rows)) - sum(self.done)
        if missing:
            raise RuntimeError(
                f"the engine did not compute {missing} of the tokens of probe `{self.request.probe.name}` (cached or preempted?)"
            )
        kept = list(self.request.probe.kept) or slice(None)
        for tap in self.pending:
            computed = logits(head, self.parts.pop(tap.site)[:, kept])
            self.inner.see(tap, computed)
            self._returned(computed)

    def _returned(self, computed: Tensor) -> None:
        """Record, as the returned logits, the logits that the engine sampled from, at the tokens where it sampled.

        At all other positions `computed` is used, and those positions are noted as not tested.
        """
        if not self.request.returned:
            return
        if not self.sampled:
            self.inner.not_tested.append(
                NotTested(what=SAMPLER, why="the engine did not show what it gave its sampler")
            )
            return
        value, probe = computed.clone(), self.request.probe
        places = {column: place for place, column in enumerate(probe.kept or range(probe.shape[1]))}
        for (row, column), own in self.sampled.items():
            if column in places:
                value[row, places[column]] = own
        self.inner.not_tested.append(ELSEWHERE)
        self.inner.returns(value)


def logits(head: Head, hidden: Tensor) -> Tensor:
    """Return the engine's own logits `[b p d_vocab]` of final-norm outputs `[b p d_model]`, computed in slices.

    The engine's head leaves out the padding of the vocabulary.
    """
    flat = hidden.flatten(0, 1)
    out: Tensor | None = None
    for start in range(0, len(flat), LOGITS_ROWS):
        part = head(flat[start : start + LOGITS_ROWS]).to("cpu")
        if out is None:
            out = torch.empty(len(flat), part.shape[-1], dtype=part.dtype)
        out[start : start + len(part)] = part
    assert out is not None
    logits: Tensor = out.unflatten(0, hidden.shape[:2])
    return logits
