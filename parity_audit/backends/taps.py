"""Record sites from a running model, and replace them if a replay asks for it.

Each tap gets one hook. The hook brings its tensor to the canonical layout, copies it to the CPU and writes it at once,
so that at most one site is held in memory and an engine that reuses its buffers cannot alter what was recorded.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from einops import EinopsError, rearrange
from torch import Tensor, nn

from parity_audit.backends.paths import get
from parity_audit.backends.sink import read_input, write_returned, write_site
from parity_audit.core.manifest import Entry
from parity_audit.core.sites import ATTENTION_SITES, LOGITS, RETURNED
from parity_audit.core.types import NotTested, NotVisible, SiteTap
from parity_audit.core.wire import FLOAT64, RunReply, RunRequest

ATTENTION = "attention:"
HOOK = "hook"
TOKENS = "(b p"
SCATTER = "output_scatter"
METHOD = "method:"
CALLED_WITHOUT = "`{}` was called without a tensor at `{}`"


class Recording(Protocol):
    """Receives tensors from hooks: a `Recorder`, or a `Gatherer`, which collects a site over an engine's steps."""

    request: RunRequest

    def misses(self, tap: SiteTap, why: str) -> None:
        """See `Recorder.misses`."""

    def see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        """See `Recorder.see`."""


@dataclass
class Recorder:
    """Writes the sites of one run, and notes what was written, what was not visible and what was not tested."""

    request: RunRequest
    entries: dict[str, Entry] = field(default_factory=dict)
    not_tested: list[NotTested] = field(default_factory=list)
    not_visible: list[NotVisible] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        """Write a site as it was computed; return its replacement in the same layout, None if it is not replaced.

        Torch function modes are off in this method, because the judge's mode would change the recorder's casts.
        """
        with torch._C.DisableTorchFunction():
            return self._see(tap, native)

    def _see(self, tap: SiteTap, native: Tensor) -> Tensor | None:
        if TOKENS in tap.layout:
            batch, positions = self.request.probe.shape
            tap = replace(tap, sizes={**tap.sizes, "b": batch, "p": positions})
        try:
            canonical = to_canonical(native, tap)
        except EinopsError:
            self.misses(tap, f"it holds {list(native.shape)} here, which is not `{tap.layout.partition(' -> ')[0]}`")
            return None
        imposed = self.request.imposed.get(tap.site)
        if imposed is not None:
            given = read_input(imposed).to(canonical)
            canonical = torch.where(given.isnan(), canonical, given)
        self.keep(tap.site, self._rows(canonical))
        path = self.request.inputs.get(tap.site)
        if path is not None:
            canonical = self._only_real(tap.site, read_input(path).to(canonical), canonical)
        return None if path is None and imposed is None else from_canonical(canonical, native, tap)

    def _rows(self, canonical: Tensor) -> Tensor:
        """Return the rows of the batch that the request wants written.

        A tensor of a single row, as learned positions may be, stands for all rows and is returned unchanged.
        """
        shared = len(canonical) == 1
        return canonical if self.request.rows is None or shared else canonical[list(self.request.rows)]

    def _positions(self, site: str, canonical: Tensor) -> Tensor:
        """Return the positions that the probe keeps (`probe.kept`), if `canonical` `[b p ...]` has all positions.

        Attention matrices and tensors with another number of positions are returned unchanged.
        """
        probe = self.request.probe
        whole = probe.kept and canonical.ndim > 1 and canonical.shape[1] == probe.shape[1]
        return canonical[:, list(probe.kept)] if whole and not site.endswith(ATTENTION_SITES) else canonical

    def misses(self, tap: SiteTap, why: str) -> None:
        """Note, once per site, that a site is not visible and why.

        This is no error: a port that computes or lays out one site in another way can still show its other sites.
        """
        if tap.site not in {item.site for item in self.not_visible}:
            self.not_visible.append(NotVisible(site=tap.site, why=why))

    def keep(self, site: str, canonical: Tensor) -> None:
        """Write a site, unless it was written before: only the first tensor of a site counts."""
        if site not in self.entries:
            self.write(site, canonical)

    def write(self, site: str, canonical: Tensor) -> None:
        """Write a site, in float64 for the judge and in float32 otherwise.

        A site with complex numbers is noted as not visible.

        Raises:
            ValueError: the model returned complex logits, whose imaginary part would be dropped silently.
        """
        if canonical.is_complex():
            kind = str(canonical.dtype).removeprefix("torch.")
            if site == RETURNED:
                raise ValueError(f"the call of the model returned {kind} numbers; logits are real numbers")
            self.not_visible.append(NotVisible(site=site, why=f"it holds {kind} numbers here"))
            return
        canonical = self._positions(site, canonical)
        dtype = torch.float64 if self.request.precision == FLOAT64 else torch.float32
        if site == RETURNED:
            self.entries[site] = write_returned(self.request, canonical, dtype, self.entries.get(LOGITS))
        else:
            self.entries[site] = write_site(self.request, site, canonical, dtype)

    def returns(self, value: Any) -> None:
        """Write the logits that the call of the model returned, if the request asks for them.

        Raises:
            ValueError: `value`, the returned object, holds no logits.
        """
        if not self.request.returned:
            return
        found = returned_logits(value)
        if found is None:
            raise ValueError(
                f"the call of the model returned a {type(value).__name__}, in which no logits were found: return the "
                "logits [batch, pos, d_vocab], or an object that has them as `.logits`"
            )
        with torch._C.DisableTorchFunction():
            self.keep(RETURNED, self._rows(found.detach()))

    def _only_real(self, site: str, given: Tensor, computed: Tensor) -> Tensor:
        """Return `given` at real positions and `computed` at padded ones, where values of another model mean nothing."""
        mask = torch.tensor(self.request.probe.mask, dtype=torch.bool, device=computed.device)
        if site.endswith(ATTENTION_SITES):
            real = mask[:, None, :, None] & mask[:, None, None, :]
        else:
            real = mask.reshape(*mask.shape, *[1] * (computed.ndim - 2))
        out = computed.clone()
        index = tuple(slice(0, size) for size in given.shape)
        out[index] = torch.where(real.expand(computed.shape)[index], given, computed[index])
        return out

    def reply(self) -> RunReply:
        """Return the reply of the run; sites whose hooks never ran are reported as not visible."""
        silent = [tap.site for tap in self.request.taps if tap.site not in self.entries]
        hidden = [item for item in self.not_visible if item.site not in self.entries]
        known = {item.site for item in hidden}
        hooks = {tap.site for tap in self.request.taps if tap.take == HOOK}
        missed = [
            NotVisible(site=site, why="the hook never fired" if site in hooks else "its module did not run")
            for site in silent if site not in known
        ]  # fmt: skip
        assumed = {tap.site: tap.assumes for tap in self.request.taps}
        entries = (replace(entry, assumes=assumed.get(site, "")) for site, entry in self.entries.items())
        return RunReply(
            entries=tuple(entries), not_visible=(*hidden, *missed),
            not_tested=tuple(self.not_tested), seconds=time.perf_counter() - self.started,
        )  # fmt: skip


@contextmanager
def hooked(root: nn.Module, recorder: Recording, whole: nn.Module | None = None) -> Iterator[None]:
    """Set hooks for every tap that names a module's input, output or method, while the context is open.

    Attention taps are set by `attention.py`, and TransformerLens' own hooks by `hook_points.py`.

    Args:
        root: the module in which the modules of taps are looked up.
        recorder: receives the tensors.
        whole: the module that is called, if `root` is a part of it. Taps that name no module are set on it.
    """
    with ExitStack() as stack:
        for tap in recorder.request.taps:
            if tap.take.startswith(ATTENTION) or tap.take == HOOK:
                continue
            try:
                module = get(root, tap.module) if tap.module else root if whole is None else whole
            except LookupError:
                module = None
            if module is None:
                recorder.misses(tap, f"no module `{tap.module}` here")
                continue
            stack.callback(_register(module, tap, recorder).remove)
        yield


def _register(module: nn.Module, tap: SiteTap, recorder: Recording) -> Any:
    if tap.take.startswith(METHOD):
        return WatchedMethod(module, tap, recorder)
    if tap.take.startswith("input"):
        return module.register_forward_pre_hook(partial(before, tap, recorder), with_kwargs=True)
    return module.register_forward_hook(partial(after, tap, recorder))


class WatchedMethod:
    """Records a method of a module, other than its forward, until `remove`.

    `method:NAME` records what the method returns, and `method:NAME:1` its second positional argument.
    """

    def __init__(self, module: nn.Module, tap: SiteTap, recorder: Recording) -> None:
        _, self.name, *argument = tap.take.split(":")
        self.module, self.before = module, vars(module).get(self.name)
        own = getattr(module, self.name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if argument:
                given = before(replace(tap, take=f"input:{argument[0]}"), recorder, own, args, kwargs)
                args, kwargs = (args, kwargs) if given is None else given
                return own(*args, **kwargs)
            made = own(*args, **kwargs)
            other = after(replace(tap, take="output"), recorder, module, args, made)
            return made if other is None else other

        setattr(module, self.name, watched)

    def remove(self) -> None:
        """Restore the original method."""
        if self.before is None:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self.before)


def before(tap: SiteTap, recorder: Recording, called: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """Record an argument of a module or method; return replaced `(args, kwargs)` for the call, or None to keep its own.

    A call without a tensor at that argument makes the site not visible: no other argument is taken for the site.
    """
    if tap.take.startswith("input_sum"):
        number = _number(tap.take)
        first, second = (*args[number:], None, None)[:2]
        if not isinstance(first, Tensor):
            return recorder.misses(tap, CALLED_WITHOUT.format(tap.module, tap.take))
        replacement = recorder.see(tap, first if second is None else first + second)
        if replacement is None:
            return None
        both = (replacement,) if second is None else (replacement, torch.zeros_like(second))
        return (*args[:number], *both, *args[number + len(both) :]), kwargs
    held = dict(enumerate(args)) | kwargs
    place = _place(tap.take.partition(":")[2] or "0", called, held)
    if place not in held or not isinstance(held[place], Tensor):
        return recorder.misses(tap, CALLED_WITHOUT.format(tap.module, tap.take))
    replacement = recorder.see(tap, held[place])
    if replacement is None:
        return None
    held[place] = replacement
    return tuple(held[index] for index in range(len(args))), {name: held[name] for name in kwargs}


def _place(asked: str, called: Callable[..., Any] | None, held: Mapping[int | str, Any]) -> int | str | None:
    """Return the number or name under which a call holds the argument `asked` for, None if it cannot be found.

    A caller may pass the same argument by position or by name, and the signature of `called` says which name belongs to
    which position. If the signature names no arguments (`*args, **kwargs`), argument 0 is the first tensor.
    """
    place: int | str = int(asked) if asked.isdigit() else asked
    if place in held:
        return place
    signature = [] if called is None else inspect.signature(getattr(called, "forward", called)).parameters.values()
    names = [item.name for item in signature if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if isinstance(place, str):
        return names.index(place) if place in names else None
    if names or place:
        return names[place] if place < len(names) else None
    return next((key for key, value in held.items() if isinstance(value, Tensor)), None)


def after(tap: SiteTap, recorder: Recording, module: nn.Module | None, args: Any, output: Any) -> Any:
    """Record what a module returned; return the replaced output, or None if a replay does not replace the site."""
    if isinstance(output, Tensor):
        return recorder.see(tap, output)
    if tap.take == "output_sum":
        recorder.see(tap, output[0] if output[1] is None else output[0] + output[1])
        return None
    number = _number(tap.take)
    if tap.take.startswith(SCATTER):
        return _scattered(tap, recorder, output, number)
    replacement = recorder.see(tap, output[number])
    if replacement is None:
        return None
    return (*output[:number], replacement, *output[number + 1 :]) if isinstance(output, tuple) else None


def _scattered(tap: SiteTap, recorder: Recording, output: Any, number: int) -> Any:
    """Record expert weights `[..., k]` and the chosen experts as one dense tensor with a weight for every expert.

    A replacement is put back as the k largest weights and their experts. If it has more than k non-zero weights at some
    token, all of these are kept.
    """
    weights, chosen = output[number : number + 2]
    empty = weights.new_zeros(*weights.shape[:-1], tap.sizes["expert"])
    replacement = recorder.see(tap, empty.scatter(-1, chosen, weights))
    if replacement is None:
        return None
    count = max(chosen.shape[-1], int((replacement != 0).sum(-1).max()))
    largest = replacement.topk(count, dim=-1)
    return (*output[:number], largest.values, largest.indices.to(chosen), *output[number + 2 :])


def returned_logits(value: Any) -> Tensor | None:
    """Return the logits in the output of a model: the tensor itself, `.logits`, `["logits"]`, or the first element.

    Returns None if that is no tensor.
    """
    if isinstance(value, Mapping):
        value = value.get("logits")
    elif hasattr(value, "logits"):
        value = value.logits
    elif isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def _number(take: str) -> int:
    _, _, number = take.partition(":")
    return int(number) if number else 0


def to_canonical(native: Tensor, tap: SiteTap) -> Tensor:
    """Return a backend's tensor with the canonical axes and scale of its site."""
    value = native.detach()
    if tap.slice is not None:
        value = value[..., tap.slice[0] : tap.slice[1]]
    if tap.layout:
        value = _laid_out(value, tap.layout, tap)
    if tap.part is not None:
        value = value[..., tap.part[0] : tap.part[1]]
    if tap.relayout:
        value = _laid_out(value, tap.relayout, tap)
    return value if tap.scale is None else value * tap.scale


def from_canonical(value: Tensor, native: Tensor, tap: SiteTap) -> Tensor:
    """Return the native tensor with this site's part replaced by `value`, as the inverse of `to_canonical`."""
    if tap.scale is not None:
        value = value / tap.scale
    cut = native if tap.slice is None else native[..., tap.slice[0] : tap.slice[1]]
    if tap.relayout:
        value = _laid_out(value, _inverse(tap.relayout), tap)
    if tap.part is not None:
        value = _replaced(_laid_out(cut, tap.layout, tap) if tap.layout else cut, value, tap.part)
    if tap.layout:
        value = _laid_out(value, _inverse(tap.layout), tap)
    value = value.to(native)
    return value if tap.slice is None else _replaced(native, value, tap.slice)


def _replaced(whole: Tensor, value: Tensor, span: tuple[int, int]) -> Tensor:
    """Return a copy of `whole` with the entries `[start, stop)` of its last axis replaced by `value`."""
    out = whole.clone()
    out[..., span[0] : span[1]] = value
    return out


def _laid_out(value: Tensor, pattern: str, tap: SiteTap) -> Tensor:
    """Return `rearrange(value, pattern)`, with those of the tap's axis sizes that the pattern names."""
    axes = set(pattern.replace("(", " ").replace(")", " ").split())
    out: Tensor = rearrange(value, pattern, **{axis: size for axis, size in tap.sizes.items() if axis in axes})
    return out


def _inverse(pattern: str) -> str:
    source, _, target = pattern.partition("->")
    return f"{target} -> {source}"
