"""Run the reference and its judge again with the experts that another side chose, where rounding decides the choice.

A token that goes to other experts because of rounding, and every later value that depends on it, can only be compared
with a run of the same choice (see `compare.choices`). So the judge, and with it the reference, runs those probes again
with the router's weights replaced at those tokens alone. The experts of every other token remain the program's own, and
a choice that rounding does not explain remains an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.store import TENSOR, Capture, with_newer
from parity_audit.capture.take import Files, take_capture
from parity_audit.compare.choices import DTYPE, ROUTER_LOGITS, ROUTER_WEIGHTS, OtherChoice, Pair, Route, other_choices
from parity_audit.core.types import Probe
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.formulas.decoder import Run, decoder_of
from parity_audit.formulas.place import Batch
from parity_audit.formulas.stored import CheckpointTensors
from parity_audit.specs.facts import decoder_facts
from parity_audit.specs.view import knob_values


@dataclass(frozen=True, kw_only=True)
class Followed:
    """Both runs with the choices of a side, and one line for the report per probe that was run again."""

    pair: Pair[Capture]
    told: tuple[str, ...]


def route_of(plan: SidePlan) -> Route | None:
    """The function from router logits to expert weights of this architecture; None without routers and in narrow
    dtypes."""
    if plan.dtype != DTYPE or "moe.top_k" not in knob_values(plan.spec, plan.config):
        return None
    stored = CheckpointTensors(Path(plan.checkpoint.path))
    decoder = decoder_of(decoder_facts(plan.spec, plan.config), stored, torch.float64)

    def route(layer: int, logits: Tensor) -> Tensor:
        ones = torch.ones(logits.shape[:-1], dtype=torch.long)
        own = {f"blocks.{layer}.{ROUTER_LOGITS}": logits}
        run = Run(decoder=decoder, batch=Batch(tokens=ones, mask=ones, positions=ones), given=own.get)
        return run.computed(f"blocks.{layer}.{ROUTER_WEIGHTS}")

    return route


def follow(
    session: Session, pair: Pair[Capture], side: Capture, probes: Sequence[Probe], out: Path, *,
    before_runs: Callable[[], None] | None = None,
) -> Followed:  # fmt: skip
    """Run the judge, and the native run of `session`, with the experts that `side` chose where rounding decides.

    One layer of each probe is changed per round, since a changed choice may change the logits of later routers.

    Args:
        session: the program that ran both captures of `pair`, in float64 and natively.
        side: the capture that the pair is to be compared with; if it is `pair.floor` itself, only the judge is run
            again.
        before_runs: called once, before the first run.

    Raises:
        NotJudged: a run failed.
    """
    route, start = route_of(session.plan), pair
    imposed: dict[str, dict[str, str]] = {}
    told: dict[str, list[str]] = {}
    left = list(probes) if route is not None else []
    for number in count():  # one layer of each probe per round; no layer is changed twice
        rounding = pair if side is pair.floor else start
        made = {
            probe.name: _first_choice(side, pair.judge, rounding, probe, route, imposed.get(probe.name, {}))
            for probe in left
        }
        left = [probe for probe in left if made[probe.name] is not None]
        if not left:
            break
        if number == 0 and before_runs is not None:
            before_runs()
        for probe in left:
            choice = made[probe.name]
            assert choice is not None
            imposed.setdefault(probe.name, {})[choice.site] = _written(choice, probe, out / f"choices-{number}")
            told.setdefault(probe.name, []).append(_words(choice))
        judge = take_capture(session, left, out / f"judge-{number}", precision=FLOAT64, imposed=imposed)
        pair = Pair(judge=with_newer(pair.judge, judge, out / f"judged-{number}"), floor=pair.floor)
    if imposed and side is not pair.floor:
        native = [probe for probe in probes if probe.name in imposed]
        floor = take_capture(session, native, out / "reference", precision=NATIVE, imposed=imposed)
        pair = Pair(judge=pair.judge, floor=with_newer(pair.floor, floor, out / "followed"))
    return Followed(pair=pair, told=tuple(f"probe {name}: {', '.join(words)}" for name, words in told.items()))


def _first_choice(
    side: Capture, judge: Capture, rounding: Pair[Capture], probe: Probe, route: Route | None, done: Mapping[str, str]
) -> OtherChoice | None:
    """The differing choice of the first layer that has one.

    None if there is none, or if that layer's choice was already imposed and still differs.
    """
    if route is None or not side.sites(probe.name):
        return None
    first = next(other_choices(side, judge, rounding, probe.as_captured(), route), None)
    return None if first is None or first.site in done else first


def choices_of_replay(
    side: Capture, replay: Capture, rounding: Pair[Capture] | None, probes: Sequence[Probe], route: Route | None, out: Path,
    dtype: str,
) -> Files:  # fmt: skip
    """The router weights to impose on another replay on a side's own inputs: the side's choices in every layer.

    All layers are done at once, because in such a replay no layer inherits another layer's choice.

    `rounding` shows by how much logits are rounded; None if `side` itself is the run that shows it. `dtype` is the
    dtype in which `side` computes.
    """
    if route is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for probe in probes:
        usual = rounding or Pair(judge=replay, floor=side)
        for choice in other_choices(side, replay, usual, probe.as_captured(), route, dtype):
            found.setdefault(probe.name, {})[choice.site] = _written(choice, probe, out)
    return found


def _written(choice: OtherChoice, probe: Probe, folder: Path) -> str:
    """Write the expert weights of one layer to a file and return its path; they are NaN except at tokens with another
    choice."""
    batch, length = probe.shape
    whole = torch.full((batch, length, choice.weights.shape[-1]), torch.nan, dtype=torch.float64)
    columns = torch.tensor(probe.kept) if probe.kept else torch.arange(length)
    part = whole[:, columns]
    part[choice.taken] = choice.weights[choice.taken]
    whole[:, columns] = part
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{probe.name}-{choice.site}.safetensors"
    save_file({TENSOR: whole}, path)
    return str(path)


def _words(choice: OtherChoice) -> str:
    count = int(choice.taken.sum())
    return f"{count} token{'s' if count > 1 else ''} in layer {choice.layer}"
