"""Read the tensors that a port's hooks show, each under its own name, while a short probe runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.core.sites import layer_of
from parity_audit.core.types import Probe, SiteTap
from parity_audit.core.wire import RunRequest
from parity_audit.specs.hook_names import ADDED_RESULT, RESULT, Hook

HEADS = (RESULT, ADDED_RESULT)


@dataclass
class Values:
    """Tensors by hook name, computed on request; only the last one is kept. Implements `compare.source.TensorSource`."""

    probe: Probe
    made: Mapping[str, Callable[[], Tensor]]
    last: tuple[str, Tensor] | None = field(default=None, init=False)

    @property
    def probes(self) -> Sequence[Probe]:
        """The single probe that was run."""
        return (self.probe,)

    def sites(self, probe: str) -> set[str]:
        """Return the names of the hooks."""
        return set(self.made) if probe == self.probe.name else set()

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        """Return the shape of one hook's tensor."""
        return tuple(self.tensor(site).shape)

    def assumes(self, probe: str, site: str) -> str:
        """Return "": a hook's value is what its users see, so it rests on no assumption."""
        return ""

    def raised(self, probe: str) -> str:
        """Return "": the probe ran without an error."""
        return ""

    def digest(self, probe: str, site: str) -> str:
        """Return "": no digest is known."""
        return ""

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """Return the positions `[start, stop)` of one hook's tensor, on axis 1."""
        return self.tensor(site)[:, start:stop]

    def tensor(self, hook: str) -> Tensor:
        """Return one hook's whole tensor."""
        if self.last is None or self.last[0] != hook:
            self.last = hook, self.made[hook]()
        return self.last[1]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The values by hook, and for each hook without a value the reason."""

    values: Values
    hidden: Mapping[str, str]


def read_hooks(session: Session, hooks: Iterable[Hook], probe: Probe, out: Path) -> Reading:
    """Run the probe and read every hook.

    The heads' results are read in a separate run, because the switch that enables them changes how attention is computed, and
    in the middle block only, because they are large.

    Raises:
        NotJudged: the backend failed.
    """
    taps = {hook.name: hook.tap for hook in hooks if hook.promises not in HEADS}
    heads = {hook.name: hook.tap for hook in hooks if hook.promises in HEADS}
    middle = max((layer_of(name) or 0 for name in heads), default=0) // 2
    heads = {name: tap for name, tap in heads.items() if layer_of(name) == middle}
    made: dict[str, Callable[[], Tensor]] = {}
    hidden: dict[str, str] = {}
    for number, part in enumerate((taps, heads)):
        if part:
            _run(session, list(part.values()), probe, out / str(number), made, hidden)
    return Reading(values=Values(probe, made), hidden=hidden)


def _run(
    session: Session, taps: Sequence[SiteTap], probe: Probe, out: Path, made: dict[str, Callable[[], Tensor]],
    hidden: dict[str, str],
) -> None:  # fmt: skip
    reply = session.run(RunRequest(probe=probe, taps=tuple(taps), out=str(out)))
    hidden |= {item.site: item.why for item in reply.not_visible}
    for entry in reply.entries:
        made[entry.site] = _reader(out / entry.file)


def _reader(path: Path) -> Callable[[], Tensor]:
    return lambda: load_file(path)["x"]
