"""TransformerLens 3.x and later: TransformerBridge, which puts hook points around the modules of a transformers model."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch

from parity_audit.backends.base import Tell
from parity_audit.backends.decoding import Step, StepInputs, decode, inputs_of
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.hook_points import named_hooks
from parity_audit.backends.hooked_transformer import (
    HARNESS_SETTINGS,
    HookedTransformerBackend,
    load_hf_model,
    tokenization,
)
from parity_audit.backends.loading import load_name, own_tokenizer, text_config
from parity_audit.backends.modes import not_run
from parity_audit.backends.processing import of_bridge
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.backends.wrappers import BRIDGE_PART
from parity_audit.core.text_names import text_names
from parity_audit.core.types import Description, WeightPrint
from parity_audit.core.wire import LoadRequest, RunReply, RunRequest, WeightsRequest


class TransformerBridgeBackend(HookedTransformerBackend):
    """Loads a model with `TransformerBridge.boot_transformers` by its name, as a user would, without compatibility mode.

    Settings are passed to `boot_transformers`. The setting `compatibility_mode=true` switches on the processed weights.
    """

    has_tokenizer = True

    def prepare(self, request: LoadRequest) -> None:
        """Import TransformerLens."""
        importlib.import_module("transformer_lens.model_bridge")

    def load(self, request: LoadRequest) -> None:
        """Load the bridge. Its sizes come from the checkpoint's own config, so no size has to be replaced."""
        from transformer_lens.model_bridge import TransformerBridge

        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        settings = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
        compatible = settings.pop("compatibility_mode", False)
        name = load_name(request.checkpoint)
        if not request.checkpoint.by_name:
            settings["hf_model"] = load_hf_model(name, request.dtype)
        self.has_tokenizer = own_tokenizer(name) is not None
        with ExitStack() as stack:
            if not self.has_tokenizer:
                settings["tokenizer"] = stack.enter_context(_stand_in())
            self.model = TransformerBridge.boot_transformers(
                name, device=request.device, dtype=getattr(torch, request.dtype), **settings
            )
        if compatible:
            self.model.enable_compatibility_mode()
        self.model.eval()

    def describe(self) -> Description:
        """Return versions, live knob values, and the attention implementation that the bridge chose."""
        model = self.model
        hf_config = text_config(model.original_model.config)
        settings = {**self.request.settings, "attn_implementation": hf_config._attn_implementation}
        return Description(
            backend="transformer_lens", package="transformer-lens", version=importlib.metadata.version("transformer-lens"),
            versions=versions("transformer-lens", "transformers"),
            settings=settings, not_run=not_run("transformer_bridge", settings),
            effective=effective(model, self.request.reads),
            tokenization=tokenization(model, self.request) if self.has_tokenizer else {},
            max_positions=getattr(hf_config, "max_position_embeddings", None),
            numerics=numerics(next(model.original_model.parameters()).dtype),
            parameters=sum(parameter.numel() for parameter in model.original_model.parameters()),
            processing=of_bridge(model),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the parameters under the names that transformers gives them, without bridge wrappers."""
        named = self.model.original_model.named_parameters(remove_duplicate=False)
        values = {name.replace(BRIDGE_PART, ""): value for name, value in named}
        return fingerprints({name: values[held] for name, held in text_names(values).items()}, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run the probe in one forward pass, or in steps with the key-value cache if the request asks for that."""
        if request.in_steps:
            return decode(request, self.model, self._cached(), self.request.device)
        recorder = Recorder(request)
        inputs = inputs_of(request.probe, self.request.device)
        with torch.no_grad(), hooked(self.model, recorder), named_hooks(self.model, recorder):
            # By default the model makes a cache, and with one, hooks inside a linear attention do not fire.
            recorder.returns(self.model(inputs.tokens, return_type="logits", use_cache=False, **inputs.padding))
        return recorder.reply()

    def _cached(self) -> Step:
        """Return a function that runs one step with a cache of transformers.

        The cache is made from the config, because each layer of a hybrid model needs a cache of its own kind.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.original_model.config)

        def step(inputs: StepInputs) -> Any:
            return self.model(inputs.tokens, return_type="logits", past_key_values=cache, **inputs.padding)

        return step


@contextmanager
def _stand_in() -> Iterator[Any]:
    """Yield a tokenizer of one token, for a checkpoint that has no tokenizer.

    The bridge cannot be loaded without a tokenizer, but the audit passes token ids and never uses it. Its directory
    exists while the context is open, because the bridge loads the tokenizer a second time from that directory.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    unknown = "<unk>"
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({unknown: 0}, unk_token=unknown)),
        **{f"{kind}_token": unknown for kind in ("unk", "bos", "eos", "pad")},
    )
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder)
