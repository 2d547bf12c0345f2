"""A spec as a program: its formulas on the tensors of the checkpoint, without the code of any engine.

The main process resolves the spec (`LoadRequest.decoder`), so nothing here reads YAML. As the judge everything is computed in
float64; natively in the dtype of the run, so its distance to itself in float64 is ordinary rounding. Settings are knob
values that take the place of the spec's: `spec,attention.scale=14.97`.
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
from parity_audit.backends.prints import canonical
from parity_audit.backends.taps import Recorder
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
KNOB = "knob"
"""The edit of a live spec: `path` is the knob's name, `value` its value, or one per layer."""


class SpecBackend:
    """The formulas of a spec."""

    request: LoadRequest
    stored: CheckpointTensors

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.originals: dict[str, list[Any]] = {}

    def prepare(self, request: LoadRequest) -> None:
        """Nothing has to be imported first."""

    def load(self, request: LoadRequest) -> None:
        """Open the checkpoint.

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
        """The program's own version; its values are the spec's."""
        return Description(
            backend="spec", package="parity-audit", version=__version__, versions=versions(), settings=self.request.settings,
            not_run=not_run("spec", self.request.settings), numerics=numerics(getattr(torch, self.request.dtype)),
            parameters=self.stored.numbers(),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Fingerprints of the stored tensors."""
        for tap in request.taps:
            value = self.stored(tap.path)
            if value is not None:
                yield fingerprint(tap.name, canonical(value, tap))

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """The formulas from token ids on, block by block; a replay's tensors take the place of computed ones."""
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
        """Bring the values to the spec's with these edits.

        Raises:
            ValueError: an edit of another kind.
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
        """One value per layer of every knob."""
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
    """What a replay puts in place of a site; padded positions keep what the formulas make of them."""
    request = recorder.request
    if site not in taps or site not in (*request.inputs, *request.imposed):
        return None
    return recorder.see(taps[site], run.computed(site))
