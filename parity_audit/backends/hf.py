"""The backend for models of transformers, 4.43 to current. It also runs the judge (true float64) and the replays."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from parity_audit.backends import hf_scores, positions
from parity_audit.backends.attention import watched
from parity_audit.backends.base import Tell
from parity_audit.backends.caches import Continued
from parity_audit.backends.decoding import Step, StepInputs, decode
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.float64 import promoted
from parity_audit.backends.generation import greedy
from parity_audit.backends.hf_places import Placement, parts_per_device
from parity_audit.backends.hf_ranks import RANKS, HfRanks
from parity_audit.backends.loading import (
    auto_class,
    load_name,
    makes_cache,
    require_known,
    text_config,
    tokenization,
    unknown_setting,
)
from parity_audit.backends.modes import not_run
from parity_audit.backends.offload import readable_in_any_mode
from parity_audit.backends.row_blocks import RowBlocks
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.text_model import paths_in_whole, text_model
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.text_names import text_names
from parity_audit.core.types import Description, Probe, ReadBack, WeightPrint
from parity_audit.core.wire import FLOAT64, PLACES, ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

DEFAULT_ATTENTION = "eager"
LOGITS_TO_KEEP = "logits_to_keep"
"""Argument of a model's forward since transformers 4.48 with the positions whose logits are computed."""
SHOWN = 3
"""Largest number of missing tensors that an error message names."""


class HfBackend:
    """A model that `AutoModelForCausalLM`, or the class for text from several modalities, loads.

    The setting `attn_implementation` defaults to eager. `tp` is the number of processes over which the model is split, and the
    settings in `PLACES`, such as `device_map`, say where its parts are placed. `tf32` allows TF32. Other settings override
    attributes of the config.
    """

    request: LoadRequest
    model: nn.Module
    ranks: HfRanks | None = None
    places: Placement | None = None

    def __init__(self) -> None:
        self.edits = LiveEdits()

    def prepare(self, request: LoadRequest) -> None:
        """Import the module that every transformers model needs."""
        importlib.import_module("transformers.modeling_utils")

    def load(self, request: LoadRequest, **how: Any) -> None:
        """Load the model by the name that a user would type, without remote code; `how` are more arguments of `from_pretrained`."""
        if int(request.settings.get(RANKS, 1)) > 1:
            self.request, self.ranks = request, HfRanks(request, HfBackend)
            return
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        name = load_name(request.checkpoint)
        own = ("attn_implementation", "tf32", RANKS, *PLACES)
        overrides = {key: value for key, value in request.settings.items() if key not in own}
        self.places = Placement(request)
        require_known(name)
        config = transformers.AutoConfig.from_pretrained(name)
        for key, value in overrides.items():
            _set_config(text_config(config), key, value)
        attention = request.settings.get("attn_implementation", DEFAULT_ATTENTION)
        model, told = auto_class(config).from_pretrained(
            name, config=config, attn_implementation=attention, torch_dtype=getattr(torch, request.dtype),
            output_loading_info=True, ignore_mismatched_sizes=True, **how, **self.places.how,
        )  # fmt: skip
        _require_complete(model, told, request.unread)
        if self.places.asked:
            readable_in_any_mode(model)
        else:
            model.to(request.device)
        self.model = text_model(model.eval())

    @property
    def device(self) -> str:
        """The device on which tokens are given to the model.

        It is the device of the first parameter if a device map was asked for and the loaded model has none, because the whole model
        is in one place. Otherwise it is the requested device; the hooks of a model that is spread over devices move the tensors on.
        """
        whole = self.places is not None and self.places.asked and not parts_per_device(self.model)
        return str(next(self.model.parameters()).device) if whole else self.request.device

    def describe(self) -> Description:
        """Return versions, the attention implementation in force, and live knob values."""
        if self.ranks is not None:
            return self.ranks.describe()
        config: Any = self.model.config
        settings = {**self.request.settings, "attn_implementation": config._attn_implementation}
        return Description(
            backend="hf", package="transformers", version=transformers.__version__, versions=versions("transformers"),
            settings=settings, not_run=not_run("hf", settings),
            effective=effective(self.model, self.request.reads),
            tokenization=tokenization(self.request, self.model),
            max_positions=getattr(config, "max_position_embeddings", None),
            numerics=numerics(next(self.model.parameters()).dtype) | parts_per_device(self.model),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            text_paths=paths_in_whole(self.model),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return self.ranks.weights(request) if self.ranks else fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one forward pass, in the model's dtype or as the judge, or cached decoding in steps if the request asks for it."""
        if self.ranks is not None:
            return self.ranks.run(request)
        if request.in_steps:
            return decode(request, self.model, self._cached(), self.device)
        recorder = Recorder(request)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if request.precision == FLOAT64:
                stack.enter_context(promoted(self.model))
                stack.enter_context(RowBlocks())
            stack.enter_context(hooked(self.model, recorder))
            stack.enter_context(watched(self.model, recorder))
            device = self.device
            returned = self.model(
                input_ids=positions.tokens(request.probe, device),
                attention_mask=positions.mask(request.probe, device),
                position_ids=positions.position_ids(request.probe, device),
                use_cache=makes_cache(self.request),
                **_of_kept_positions(self.model, request.probe),
            )
            recorder.returns(returned)
        return recorder.reply()

    replay = run

    def score(self, request: ScoreRequest, tell: Tell) -> ScoreReply:
        """Return log-probabilities of given tokens, computed in the model's dtype or as the judge."""
        return hf_scores.score(self.model, request, self.device, tell)

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Return greedy completions of one batch."""
        return greedy(request, self._cached(), self.device)

    def _cached(self) -> Step:
        continued = Continued(self.model, self.device)

        def step(inputs: StepInputs) -> Any:
            returned = self.model(input_ids=inputs.tokens, use_cache=True, **continued.given(inputs))
            continued.keep(returned)
            return returned

        return step

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make edits of the live model. `attn_implementation` is no such edit, because it is set when the model is loaded."""
        return self.ranks.apply(request) if self.ranks else self.edits.bring_to(self.model, request.edits)


def _of_kept_positions(model: nn.Module, probe: Probe) -> dict[str, Tensor]:
    """Return the argument that restricts the logits to the probe's kept positions, if the model's forward has this argument.

    The logits of all positions of a long text with a large vocabulary take gigabytes, and twice that for the judge.
    """
    if not probe.kept or LOGITS_TO_KEEP not in inspect.signature(model.forward).parameters:
        return {}
    return {LOGITS_TO_KEEP: torch.tensor(probe.kept)}  # on the CPU: it indexes tensors on any device


def _require_complete(model: nn.Module, told: dict[str, Any], unread: Collection[str]) -> None:
    """Refuse a model with parameters that the checkpoint lacks or holds in another shape: the loader drew them at random.

    Parameters of modalities other than text do not matter, and neither do those in `unread`: the model does not use them.

    Args:
        model: the loaded model.
        told: the loading info of `from_pretrained`, with `missing_keys` and `mismatched_keys`.
        unread: names of parameters that this model never reads.

    Raises:
        BackendFailed: there are such parameters.
    """
    parameters = {name for name, _ in model.named_parameters()}
    used = {name for own, name in text_names(parameters).items() if own not in unread}
    absent = sorted(used & {str(name) for name in told["missing_keys"]})
    other = sorted({str(item[0]) for item in told.get("mismatched_keys") or ()} - (parameters - used))
    for names, what in ((absent, "does not hold"), (other, "holds in another shape")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise BackendFailed(f"the checkpoint {what} {', '.join(names[:SHOWN])}{more}", code="missing-tensors")


def _set_config(config: Any, key: str, value: Any) -> None:
    if not hasattr(config, key):
        raise unknown_setting(key, [*config.to_dict(), "attn_implementation"], type(config).__name__)
    setattr(config, key, value)
