"""One architecture's miniature in transformers, in this process: what it shows natively and as the judge."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file
from torch import Tensor

from parity_audit.backends.hf import HfBackend
from parity_audit.capture.probes import plan_probes
from parity_audit.core.types import Checkpoint, Edit, Probe, SiteTap
from parity_audit.core.wire import FLOAT64, NATIVE, ApplyRequest, LoadRequest, RunReply, RunRequest
from parity_audit.specs import miniature, view
from parity_audit.specs.resolve import ResolvedModel

VERSION = transformers.__version__
OTHER_BLOCKS = {
    "gemma4, with experts": "google/gemma-4-26B-A4B", "falcon, groups of queries": "tiiuae/falcon-40b",
    "gpt2, scores by layer": "stanford-crfm/alias-gpt2-small-x21",
}  # fmt: skip
"""Models whose blocks have other parts than those of the first model of their spec."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The sites of one run, and what it could not show."""

    sites: dict[str, Tensor]
    reply: RunReply


class Architecture:
    """A spec's model at work; loaded once, each run into a folder of its own."""

    def __init__(self, model: ResolvedModel, cache: Path, out: Path) -> None:
        made = miniature.make(model, root=cache / "synthetic")
        self.model, self.out, self.runs = model, out, 0
        link = out / "checkpoint"
        link.symlink_to(made.path)
        self.checkpoint: Checkpoint = replace(made, hf_home=None, by_name=False, path=str(link))
        self.config: dict[str, Any] = json.loads((link / "config.json").read_text())
        self.taps = view.taps(model.spec, "hf", self.config, VERSION)
        self.n_layers = view.dims(model.spec, self.config)["n_layers"]
        self.probe = self.probes["short"]

    @cached_property
    def probes(self) -> dict[str, Probe]:
        return {probe.name: probe for probe in plan_probes(self.config)}

    @cached_property
    def backend(self) -> HfBackend:
        return self.loaded({})

    def loaded(self, settings: dict[str, Any]) -> HfBackend:
        backend = HfBackend()
        reads = view.reads(self.model.spec, "hf", VERSION)
        backend.load(
            LoadRequest(checkpoint=self.checkpoint, dtype="float32", device="cpu", settings=settings, reads=reads)
        )
        return backend

    @cached_property
    def native(self) -> Shown:
        return self.run(self.backend)

    @cached_property
    def judge(self) -> Shown:
        return self.run(self.backend, precision=FLOAT64)

    def run(self, backend: HfBackend, *, precision: str = NATIVE, taps: tuple[SiteTap, ...] | None = None) -> Shown:
        self.runs += 1
        out = self.out / str(self.runs)
        request = RunRequest(probe=self.probe, taps=taps or self.taps, out=str(out), precision=precision)
        reply = backend.run(request, lambda text: None)
        return Shown(sites={entry.site: load_file(out / entry.file)["x"] for entry in reply.entries}, reply=reply)

    def logits_with(self, edits: tuple[Edit, ...]) -> Tensor:
        """The native logits with these edits in force."""
        settings: dict[str, Any] = {}
        for edit in edits:
            settings |= edit.value if edit.op == "load" else {}
        backend = self.loaded(settings) if settings else self.backend
        backend.apply(ApplyRequest(edits=tuple(edit for edit in edits if edit.op != "load")))
        try:
            only = tuple(tap for tap in self.taps if tap.site == "logits")
            return self.run(backend, taps=only).sites["logits"]
        finally:
            backend.apply(ApplyRequest(edits=()))


def apart(a: Tensor, b: Tensor) -> float:
    """Relative distance where both are finite: masked scores are not."""
    kept = a.isfinite() & b.isfinite()
    x, y = a[kept].double(), b[kept].double()
    return float((x - y).norm() / y.norm())


def moved(value: Any, knob: str) -> Any:
    """Another value of a knob, None where there is nothing to move it to."""
    if knob == "attention.window":
        return None if value is None else 20
    if knob == "rope.scaling":
        return None if value else {"rope_type": "linear", "factor": 2.0}
    if knob == "mlp.activation":
        return None if not isinstance(value, str) else "gelu" if value == "relu" else "relu"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == 0:
        return None
    if knob in ("moe.top_k", "moe.top_groups", "pos_embed.offset"):
        return value + 1
    if knob == "moe.groups":
        return 2 * value
    return value * (10.0 if knob.endswith("eps") else 1.5 if knob.endswith("softcap") else 1.1)
