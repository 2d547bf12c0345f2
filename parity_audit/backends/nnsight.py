"""The backend for nnsight, which traces transformers modules. Values are read and edited inside a trace, as its users do.

Every site gets its own invoke. An invoke without an input sees the whole batch, and no invoke waits for another, so the sites
may be listed in any order. A value is written to disk inside its invoke, because all sites of a long probe together may not fit
into memory.

nnsight compiles the body of a trace from the source of the file that contains it. A worker is a zip file, and `linecache` can
read the source of a module in it only through the module's loader. `load` therefore puts this file into `linecache` first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import linecache
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parity_audit.backends import positions
from parity_audit.backends.base import Tell
from parity_audit.backends.caches import Continued
from parity_audit.backends.decoding import Step, StepInputs, stepped
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.generation import greedy
from parity_audit.backends.hf import DEFAULT_ATTENTION
from parity_audit.backends.loading import load_name, makes_cache, require_known, tokenization
from parity_audit.backends.modes import not_run
from parity_audit.backends.nnsight_sites import shown
from parity_audit.backends.paths import NoSuchPath, get
from parity_audit.backends.taps import Recorder
from parity_audit.backends.text_model import paths_in_whole, text_model
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.core.errors import BackendFailed, CannotRun
from parity_audit.core.rollouts import SampleReply, SampleRequest
from parity_audit.core.text_names import in_whole
from parity_audit.core.types import Description, ReadBack, SiteTap, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

TASK = "text-generation"
HARNESS_SETTINGS = ("tf32",)


class NnsightBackend:
    """A `TransformersModel`, loaded by the name that a user would type.

    Settings are passed to it. `attn_implementation` defaults to eager, as in the backend `hf`.
    """

    request: LoadRequest
    traced: Any
    model: nn.Module

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def prepare(self, request: LoadRequest) -> None:
        """Import nnsight's module for transformers models."""
        importlib.import_module("nnsight.modeling.transformers")

    def load(self, request: LoadRequest) -> None:
        """Load and wrap the model. It is loaded at once, although nnsight would by default wait for the first trace."""
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        linecache.getlines(__file__, globals())
        self.request = request
        settings = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
        kind, how = _model_class()
        require_known(load_name(request.checkpoint))
        self.traced = kind(
            load_name(request.checkpoint), dispatch=True, torch_dtype=getattr(torch, request.dtype),
            **{"attn_implementation": DEFAULT_ATTENTION, **how, **settings},
        )  # fmt: skip
        self.traced.to(torch.device(request.device))
        self.model = text_model(self.traced._module.eval())

    def describe(self) -> Description:
        """Return versions, the attention implementation in force, and live knob values."""
        config: Any = self.model.config
        settings = {**self.request.settings, "attn_implementation": config._attn_implementation}
        return Description(
            backend="nnsight", package="nnsight", version=importlib.metadata.version("nnsight"),
            versions=versions("nnsight", "transformers"), settings=settings, not_run=not_run("nnsight", settings),
            effective=effective(self.model, self.request.reads), tokenization=tokenization(self.request, self.traced),
            max_positions=getattr(config, "max_position_embeddings", None),
            numerics=numerics(next(self.model.parameters()).dtype),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            text_paths=paths_in_whole(self.model),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run the probe in one trace, or in one trace per step if cached decoding is requested."""
        if request.in_steps:
            step = _Cached(self)
            return stepped(request, step.watched, self.request.device)
        recorder, device = Recorder(request), self.request.device
        padding = {
            "attention_mask": positions.mask(request.probe, device),
            "position_ids": positions.position_ids(request.probe, device),
        }
        given: dict[str, Any] = {key: value for key, value in padding.items() if value is not None}
        with torch.no_grad():
            returned = self.trace(
                recorder, makes_cache(self.request), input_ids=positions.tokens(request.probe, device), **given
            )
            recorder.returns(returned)
        return recorder.reply()

    replay = run

    def trace(self, recorder: Recorder | None, use_cache: bool = False, **inputs: Any) -> Any:
        """Run one trace with an invoke for every site that the recorder asks for; return what the model returned."""
        import nnsight

        traced, shows = self.traced, [] if recorder is None else [(recorder, *each) for each in self._present(recorder)]
        returned = None
        with traced.trace(use_cache=use_cache) as tracer:
            with tracer.invoke(inputs):  # as a dict: nnsight 0.5 drops keyword arguments that it does not know
                returned = nnsight.save(traced.output)
            for seen_by, tap, envoy in shows:
                with tracer.invoke():
                    shown(tap, seen_by, envoy)
        return returned

    def _present(self, recorder: Recorder) -> Iterator[tuple[SiteTap, Any]]:
        """Yield every tap whose module the model has, with nnsight's envoy of that module."""
        for tap in recorder.request.taps:
            try:
                get(self.model, tap.module)
            except NoSuchPath:
                recorder.misses(tap, f"no module `{tap.module}` here")
                continue
            path = in_whole(tap.module, paths_in_whole(self.model)) if tap.module else ""
            yield tap, self.traced.get(path) if path else self.traced

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Return greedy completions of one batch."""
        step: Step = _Cached(self)
        return greedy(request, step, self.request.device)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make edits of the wrapped model. `attn_implementation` is no such edit, because it is set when the model is loaded."""
        return self.edits.bring_to(self.model, request.edits)


def _model_class() -> tuple[Any, dict[str, Any]]:
    """Return the class that wraps a causal language model in this release, and the arguments that the class needs.

    Raises:
        BackendFailed: with the code `cannot-run`, if the release is older than 0.5.
    """
    import nnsight

    if not hasattr(nnsight, "save"):
        version = importlib.metadata.version("nnsight")
        raise BackendFailed(
            f"nnsight {version} records a graph of proxies; traces whose values are there inside them begin with 0.5",
            code=CannotRun.default_code,
        )
    if hasattr(nnsight, "TransformersModel"):  # from 0.8 on
        return nnsight.TransformersModel, {"task": TASK}
    return nnsight.LanguageModel, {}


class _Cached:
    """Runs decoding steps with the model's own KV cache, one trace per step."""

    def __init__(self, backend: NnsightBackend) -> None:
        self.backend = backend
        self.continued = Continued(backend.model, backend.request.device)

    def __call__(self, inputs: StepInputs) -> Any:
        """Run a step without recording sites."""
        return self.watched(None, inputs)

    def watched(self, recorder: Recorder | None, inputs: StepInputs) -> Any:
        """Run a step and show its sites to the recorder, if there is one."""
        given = self.continued.given(inputs)
        returned = self.backend.trace(recorder, use_cache=True, input_ids=inputs.tokens, **given)
        self.continued.keep(returned)
        return returned
