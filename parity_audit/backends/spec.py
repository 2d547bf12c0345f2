"""Run a spec as a model: its formulas, applied to the checkpoint's tensors, without the code of any engine.

The main process resolves the spec (`LoadRequest.decoder`), so nothing here reads YAML. As the judge, everything is
computed in float64. In a native run it is computed in the dtype of the run, so that the distance of the native run to
the float64 run is ordinary rounding. Settings are knob values that replace those of the spec, for example
`spec,attention.scale=14.97`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity_audit.backends import positions
from parity_audit.backends.base import Tell
from parity_audit.backends.decoding import not_decoded
from parity_audit.backends.facts import numerics, use_exact_float32, versions
from parity_audit.backends.modes import not_run
from parity_audit.backends.taps import Recorder
from parity_audit.backends.weight_fingerprints import canonical
from parity_audit.core.errors import BackendFailed
from parity_audit.core.sites import layer_of, site_order
from parity_audit.core.types import Description, Edit, ReadBack, SiteTap, WeightPrint
from parity_audit.core.version import __version__
from parity_audit.core.wire import FLOAT64, ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest
from parity_audit.formulas.decoder import Run, decoder_of
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.place import Batch
from parity_audit.formulas.stored import CheckpointTensors

HARNESS = ("tf32",)
"""Settings that are no knobs."""
KNOB = "knob"
"""The only kind of edit of a live spec: `path` is the knob's name, and `value` is its value or one value per layer."""


class SpecBackend:
    """Runs the formulas of a spec on the tensors of a checkpoint."""

    request: LoadRequest
    stored: CheckpointTensors

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.originals: dict[str, list[Any]] = {}

    def prepare(self, request: LoadRequest) -> None:
        """Do nothing: there is no engine to import."""

    def load(self, request: LoadRequest) -> None:
        """Open the checkpoint and take the knob values from the spec and the settings.

        Raises:
            BackendFailed: the parent gave no decoder, or the checkpoint holds no embedding under the spec's name.
        """
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        if request.decoder is None:
            raise BackendFailed("no decoder was given: the spec has to be resolved by the main process")
        self.request, self.stored = request, CheckpointTensors(Path(request.checkpoint.path))
        self.values = {**request.decoder.values, **self._per_layer(request.settings)}
        self.originals = dict(self.values)
        if self._decoder("float64").weights(None, "embed") is None:
            tap = request.decoder.outside.get("embed")
            raise BackendFailed(
                f"the checkpoint holds no `{tap.path if tap else 'embed'}`, the spec's token embedding",
                code="missing-tensors",
            )

    def describe(self) -> Description:
        """Return the version of parity-audit itself, whose formulas are run, with settings and numerics."""
        return Description(
            backend="spec", package="parity-audit", version=__version__, versions=versions(), settings=self.request.settings,
            not_run=not_run("spec", self.request.settings), numerics=numerics(getattr(torch, self.request.dtype)),
            parameters=self.stored.numbers(),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Yield fingerprints of the stored tensors; tensors that the checkpoint lacks are left out."""
        for tap in request.taps:
            value = self.stored(tap.path)
            if value is not None:
                yield fingerprint(tap.name, canonical(value, tap))

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Compute the sites from the token ids on, block by block; tensors that a replay gives replace computed ones."""
        if request.in_steps:
            return not_decoded(request.probe, "formulas keep no cache: every token is computed anew")
        recorder = Recorder(request)
        taps = {tap.site: tap for tap in request.taps}
        run = Run(
            decoder=self._decoder("float64" if request.precision == FLOAT64 else self.request.dtype),
            batch=self._batch(request), shown=frozenset(taps),
        )  # fmt: skip
        run.given = lambda site: _replaced(recorder, run, taps, site)
        with torch.no_grad():
            own = set(run.sites())
            layer = 0
            for site in sorted((site for site in taps if site in own), key=site_order):
                if (layer_of(site) or 0) > layer:
                    layer = layer_of(site) or 0
                    run.forget(layer)
                recorder.see(taps[site], run.computed(site))
            recorder.returns(run.tensor("logits"))
        return recorder.reply()

    replay = run

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Reset all knobs to the values they had after `load`, then apply these edits.

        Raises:
            ValueError: an edit is not of the kind `KNOB`.
        """
        self.values = dict(self.originals)
        return [self._applied(edit) for edit in request.edits]

    def _applied(self, edit: Edit) -> ReadBack:
        if edit.op != KNOB:
            raise ValueError(f"`{edit.op}` is no edit of a spec's values")
        before = self.values.get(edit.path)
        self.values |= self._per_layer({edit.path: edit.value})
        return ReadBack(
            path=edit.path, before=before, after=self.values[edit.path], changed=before != self.values[edit.path]
        )

    def _per_layer(self, given: dict[str, Any]) -> dict[str, list[Any]]:
        """Return one value per layer for every knob in `given`; a single value is repeated for all layers."""
        assert self.request.decoder is not None
        count = self.request.decoder.dims["n_layers"]
        return {
            knob: value if isinstance(value, list) and len(value) == count else [value] * count
            for knob, value in given.items() if knob not in HARNESS
        }  # fmt: skip

    def _decoder(self, dtype: str) -> Any:
        facts = self.request.decoder
        assert facts is not None
        return decoder_of(facts, self.stored, getattr(torch, dtype), values=self.values)

    def _batch(self, request: RunRequest) -> Batch:
        device = self.request.device
        return Batch(
            tokens=positions.tokens(request.probe, device),
            mask=torch.tensor(request.probe.mask, dtype=torch.long, device=device),
            positions=positions.position_ids(request.probe, device),
        )


def _replaced(recorder: Recorder, run: Run, taps: dict[str, SiteTap], site: str) -> Tensor | None:
    """Return the tensor with which a replay replaces a site, None if it does not replace that site.

    Padded positions keep the values that the formulas computed.
    """
    request = recorder.request
    if site not in taps or site not in (*request.inputs, *request.imposed):
        return None
    return recorder.see(taps[site], run.computed(site))
