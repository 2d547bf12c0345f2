"""Ports judged in this process: the real backends, captures and verdict of an audit, without workers and without repair.

A port and its reference need a second each this way, so that many clean ports can be asked in one test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from parity_audit.backends.hf import HfBackend
from parity_audit.backends.plain_module import PlainModule
from parity_audit.cache.root import cache_root
from parity_audit.capture.probes import plan_probes
from parity_audit.capture.store import Capture, open_capture, write_manifest
from parity_audit.capture.take import whole_in_steps
from parity_audit.compare.deltas import Comparison, compare
from parity_audit.core.manifest import Manifest
from parity_audit.core.types import Checkpoint, Probe
from parity_audit.core.wire import FLOAT64, NATIVE, LoadRequest, RunRequest
from parity_audit.specs import miniature
from parity_audit.specs.load import with_site_map
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import taps

PROBES = ("short", "ragged", "left_padded", "decode")
DTYPE, DEVICE = "float32", "cpu"


@dataclass(frozen=True)
class Bench:
    """A miniature, its reference and its judge, captured once."""

    spec: Spec
    checkpoint: Checkpoint
    config: dict[str, Any]
    probes: tuple[Probe, ...]
    reference: Capture
    judge: Capture
    out: Path

    def compared(self, name: str, model: nn.Module, sites: Path | None = None) -> Comparison:
        """A port against the reference: a transformers model, or any module with a site map."""
        section, spec = ("hf", self.spec) if sites is None else ("module", with_site_map(self.spec, sites))
        backend: Any = HfBackend() if sites is None else PlainModule()
        capture = _captured(
            _ready(backend, self.checkpoint, model), spec, section, self.config, self.checkpoint, self.probes,
            self.out / name, cached=sites is None,
        )  # fmt: skip
        return compare(capture, self.reference, self.judge, dtype=DTYPE)


def bench(model: str, out: Path, names: Sequence[str] = PROBES) -> Bench:
    """The miniature of a model with its eager transformers reference."""
    resolved = resolve_model(model)
    checkpoint = miniature.make(resolved, size="mini", seed=0, root=cache_root() / "synthetic")
    config = json.loads((Path(checkpoint.path) / "config.json").read_text())
    probes = tuple(probe for probe in plan_probes(config, seed=0) if probe.name in names)
    reference = HfBackend()
    _ready(reference, checkpoint, stock(checkpoint.path))
    sides = [
        _captured(reference, resolved.spec, "hf", config, checkpoint, probes, out / precision, precision=precision)
        for precision in (NATIVE, FLOAT64)
    ]
    return Bench(resolved.spec, checkpoint, config, probes, sides[0], sides[1], out)


def stock(path: str, attention: str = "eager") -> Any:
    """The model as transformers computes it."""
    import torch
    import transformers

    made = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32)
    return made.eval()


def _ready(backend: Any, checkpoint: Checkpoint, model: nn.Module) -> Any:
    backend.request = LoadRequest(checkpoint=checkpoint, dtype=DTYPE, device=DEVICE)
    backend.model = model.eval()
    return backend


def _captured(
    backend: Any, spec: Spec, section: str, config: dict[str, Any], checkpoint: Checkpoint, probes: Sequence[Probe],
    out: Path, *, precision: str = NATIVE, cached: bool = False,
) -> Capture:  # fmt: skip
    """What every probe shows, as `take_capture` writes it."""
    silent: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    every = taps(spec, section, config, "5.19.0" if section == "hf" else "")
    replies = []
    for probe in probes:
        chosen = tuple(tap for tap in every if whole_in_steps(tap, probe))
        request = RunRequest(
            probe=probe, taps=chosen, out=str(out), precision=precision, cached=cached and probe.decode_from is not None
        )
        replies.append(backend.run(request, silent))
    write_manifest(out, Manifest(
        backend=section, dtype=DTYPE, device=DEVICE, checkpoint=checkpoint, probes=tuple(probes),
        entries=tuple(entry for reply in replies for entry in reply.entries),
        not_visible=tuple(item for reply in replies for item in reply.not_visible),
        not_tested=tuple(item for reply in replies for item in reply.not_tested),
    ))  # fmt: skip
    return open_capture(out, just_written=True)
