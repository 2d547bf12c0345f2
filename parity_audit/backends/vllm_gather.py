"""From a serving engine's flat tokens back to `[batch, pos]`, and for edits from there to flat tokens.

vLLM and SGLang run the requests of a batch side by side as one axis of tokens, in as many steps as the scheduler
likes, without padding. Each step says which tokens it runs (`input_ids`, `positions`); that is enough to
find the row and column of every one of them, whatever the scheduler does.
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
FORBIDDEN = -1e4
SAMPLER = "the logits that the engine samples from"
ELSEWHERE = NotTested(
    what=f"{SAMPLER}, at other positions than the last of a step",
    why="the engine computes none there: the model's own head on the final norm's output was compared instead",
)


@contextmanager
def hooks_of_the_whole(model: nn.Module) -> Iterator[None]:
    """Let every step pass the hooks of the model as a whole while the block lasts, where its `forward` is called past them.

    SGLang calls it so; and a class that vLLM would compile as a whole (ERNIE 4.5) does, in eager mode as well.
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
class Piece:
    """Tokens `[start, stop)` of a step are tokens `[first, first + stop - start)` of a row."""

    row: int
    first: int
    start: int
    stop: int


def place(ids: Sequence[int], positions: Sequence[int], rows: Sequence[Sequence[int]], done: list[int]) -> list[Piece]:
    """Find the rows that a step's tokens belong to, and count them in `done`.

    A row can only go on where it stopped. Of the rows that can, the one that explains most tokens is taken,
    the first among equals: vLLM schedules first come, first served, and equal rows are interchangeable. Tokens of
    no row (padding of a step) are skipped; `Gatherer.finish` notices if a row is short in the end.
    """
    pieces: list[Piece] = []
    start = 0
    while start < len(ids):
        matched = [_matched(ids, positions, start, row, done[number]) for number, row in enumerate(rows)]
        longest = max(matched, default=0)
        if longest == 0:
            start += 1
            continue
        number = matched.index(longest)
        pieces.append(Piece(row=number, first=done[number], start=start, stop=start + longest))
        done[number] += longest
        start += longest
    return pieces


def _matched(ids: Sequence[int], positions: Sequence[int], start: int, row: Sequence[int], first: int) -> int:
    """How many tokens from `start` on continue this row from its token `first` on."""
    count = 0
    while (
        first + count < len(row) and start + count < len(ids)
        and positions[start + count] == first + count and ids[start + count] == row[first + count]
    ):  # fmt: skip
        count += 1
    return count


def real_rows(probe: Probe) -> list[list[int]]:
    """The rows of a probe without their padding: the prompts that vLLM is given."""
    return [
        [token for token, real in zip(*row, strict=False) if real]
        for row in zip(probe.token_ids, probe.mask, strict=False)
    ]


def prompts_of(request: RunRequest, rows: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """The part of each row that is given as its prompt, and how many tokens are decoded behind it: as many in all rows, which end
    together where they are padded on the left."""
    first = request.probe.decode_from
    decoded = request.probe.shape[1] - first if request.cached and first is not None else 0
    return [row[: len(row) - decoded] for row in rows], decoded


def token_axis(tap: SiteTap) -> int:
    """The axis of an engine's tensor that its tokens are on: that of the batch in the site's layout, else the first."""
    axes = tap.layout.partition("->")[0].split()
    return axes.index("b") if "b" in axes else 0


def _as_in_layout(value: Tensor, axis: int) -> Tensor:
    """`[batch, pos, ...]` with these two axes where a site's layout has them."""
    return value.movedim((0, 1), (axis, axis + 1)) if axis else value


@dataclass
class Gatherer:
    """A recorder for `taps.hooked` that collects a site's tokens over steps and records the site when it is whole."""

    request: RunRequest
    inner: Recorder
    pieces: list[Piece] = field(default_factory=list)
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
        """As `Recorder.misses`."""
        self.inner.misses(tap, why)

    @contextmanager
    def steps_seen(self, model: nn.Module) -> Iterator[None]:
        """Learn of every step of the whole model while the block lasts."""
        past_hooks = type(model).__call__ is not nn.Module.__call__ and getattr(model, "do_not_compile", False)
        with hooks_of_the_whole(model) if past_hooks else nullcontext():
            hook = model.register_forward_pre_hook(self.before_step, with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()

    def before_step(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the whole model: learn where this step's tokens belong."""
        given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        ids, positions = given["input_ids"], given["positions"]
        self.step(ids.tolist(), positions.tolist())

    def step(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """What runs next: a step of these tokens at these positions."""
        if self.request.keep_cache and not any(self.done):
            self.skipped = self.done[0] = int(positions[0])  # what came out of the prefix cache is not computed
        self.pieces = place(ids, positions, self.rows, self.done)
        self.tokens = len(ids)
        self._count()

    def _count(self) -> None:
        """What the engine's scheduler did at most in a step, and in how many of them."""
        tokens = sum(piece.stop - piece.start for piece in self.pieces)
        top = self.largest
        top["requests_per_step"] = max(top["requests_per_step"], len(self.pieces))
        top["tokens_per_step"] = max(top["tokens_per_step"], tokens)
        top["steps"] += bool(tokens)

    def see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        """Copy this step's tokens `[token, ...]` of a site to their places `[batch, pos, ...]`, at once.

        Modules of transformers that vLLM runs see them as a batch of one, `[1, token, ...]`. Where the request replaces
        the site, what the engine goes on with is returned, in its own layout.
        """
        path = self.request.inputs.get(tap.site)
        self._keep(tap, native)
        return None if path is None else self._replaced(tap, native, read_input(path))

    def _replaced(self, tap: SiteTap, native: Tensor, given: Tensor) -> Tensor:
        """This step's tokens of a site with the values of `given` `[batch, pos, ...]`."""
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
        """`[token, ...]`, of which `[1, token, ...]`, one row per token and head, and tokens on another axis are other views."""
        if axis:
            return native.movedim(axis, 0)
        if native.ndim > 2 and native.shape[:2] == (1, self.tokens):
            return native[0]
        if len(native) != self.tokens and len(native) % self.tokens == 0:
            by_token: Tensor = native.unflatten(0, (self.tokens, -1))
            return by_token
        return native

    def _keep(self, tap: SiteTap, native: Tensor) -> None:
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
        """Keep what the engine gives its sampler: `[request, d_vocab]`, for the last token of each request of a step.

        With `forced` it samples each row's own next token, whatever its logits say.
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
        """What an engine calls with the logits of a step: keeps them, and returns those to sample from instead, if any."""

        def seen(out: Tensor) -> Tensor | None:
            self.sampled_from(out)
            return self.forced(out) if forced else None

        return seen

    def forced(self, out: Tensor) -> Tensor:
        """Logits `[request d_vocab]` from which each request of this step samples its row's own next token."""
        chosen = torch.full_like(out, FORBIDDEN)
        for number, piece in enumerate(self.pieces[: len(out)]):
            row, done = self.rows[piece.row], self.done[piece.row]
            chosen[number, row[done] if done < len(row) else 0] = 0.0
        return chosen

    def sampled_from(self, out: Tensor | None) -> None:
        """What the sampler of a step was given: `[request d_vocab]`, for the last token of each of its requests."""
        if out is not None and len(out) == len(self.pieces):
            self.sampled |= {self._end(piece): row for piece, row in zip(self.pieces, out.detach().cpu(), strict=True)}

    def _end(self, piece: Piece) -> tuple[int, int]:
        """Row and column of a piece's last token."""
        return piece.row, self.columns[piece.row][piece.first + piece.stop - piece.start - 1]

    def finish(self, head: Head) -> None:
        """Record what needs the engine at rest: logits at every position that is kept, in slices so that they exist only once.

        `head` gives the engine's own logits `[token d_vocab]` of final-norm outputs `[token d_model]`.

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
        """What the engine returned to its sampler, in the places of the tokens that it sampled from."""
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
    """The engine's own logits `[b p d_vocab]` of final-norm outputs `[b p d_model]`, vocabulary padding cut."""
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
