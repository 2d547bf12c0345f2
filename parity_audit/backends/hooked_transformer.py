"""The backend for HookedTransformer of TransformerLens 2.x and 3.x. Hook points are modules, so ordinary hooks see them.

The model is loaded without weight processing unless settings ask for it (`fold_ln=true`, `center_unembed=true` ...), because
the audit is about the function that the port computes, and whether the processing preserves it is a separate question.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends import positions
from parity_audit.backends.base import Tell
from parity_audit.backends.decoding import Step, StepInputs, decode
from parity_audit.backends.edits import LiveEdits
from parity_audit.backends.facts import effective, numerics, use_exact_float32, versions
from parity_audit.backends.generation import greedy
from parity_audit.backends.hook_points import named_hooks
from parity_audit.backends.loading import auto_class, chat_tokens, load_name, own_tokenizer, text_config
from parity_audit.backends.modes import not_run
from parity_audit.backends.processing import of_hooked_transformer
from parity_audit.backends.reach import run_as_far_as_it_goes
from parity_audit.backends.taps import Recorder, hooked
from parity_audit.backends.weight_fingerprints import fingerprints
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import SampleReply, SampleRequest
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest

SIZES = {
    "d_model": "d_model",
    "n_layers": "n_layers",
    "n_heads": "n_heads",
    "n_key_value_heads": "n_kv_heads",
    "d_mlp": "d_mlp",
    "d_vocab": "d_vocab",
}
HARNESS_SETTINGS = ("api", "tf32", "name")


class HookedTransformerBackend:
    """A model that `HookedTransformer.from_pretrained_no_processing` loads by the name that a user would type."""

    request: LoadRequest
    model: Any

    def __init__(self) -> None:
        self.edits = LiveEdits()
        self.replaced: dict[str, Any] = {}

    def prepare(self, request: LoadRequest) -> None:
        """Import TransformerLens."""
        importlib.import_module("transformer_lens")

    def load(self, request: LoadRequest) -> None:
        """Load the model. For a synthetic checkpoint, sizes that the release hard-codes by model name are replaced."""
        import transformer_lens

        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        settings = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
        name = official_name(str(request.settings.get("name", request.checkpoint.repo_id)))
        weights = load_name(request.checkpoint)
        if weights != name:
            settings["hf_model"] = load_hf_model(weights, request.dtype, whole=False)
            settings["tokenizer"] = own_tokenizer(weights)  # if it is None, the release loads the tokenizer of `name`
        with real_sizes(request, self.replaced):
            self.model = transformer_lens.HookedTransformer.from_pretrained_no_processing(
                name, device=request.device, dtype=getattr(torch, request.dtype), **settings
            )
        self.model.eval()

    def describe(self) -> Description:
        """Return versions, live knob values, and the port's own context limit."""
        model = self.model
        return Description(
            backend="transformer_lens", package="transformer-lens", version=importlib.metadata.version("transformer-lens"),
            versions=versions("transformer-lens", "transformers"), settings=self.request.settings,
            effective=effective(model, self.request.reads), tokenization=tokenization(model, self.request),
            max_positions=model.cfg.n_ctx, sizes_replaced=self.replaced,
            numerics=numerics(next(model.parameters()).dtype),
            parameters=sum(parameter.numel() for parameter in model.parameters()), processing=of_hooked_transformer(model),
            not_run=not_run("hooked_transformer", self.request.settings),
        )  # fmt: skip

    def weights(self, request: WeightsRequest) -> Iterator[WeightPrint]:
        """Return fingerprints of the live parameters."""
        return fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one forward pass over as many positions as the port accepts, or cached decoding in steps if that is requested."""
        if request.in_steps:
            return decode(request, self.model, self._cached(), self.request.device)
        return run_as_far_as_it_goes(request, self.model.cfg.n_ctx, self._whole)

    def _whole(self, request: RunRequest) -> RunReply:
        """Run one forward pass.

        Releases before 2.4 ignore `attention_mask` for token input and look for the tokenizer's pad id instead, so padded rows
        are given with both.
        """
        probe, recorder = request.probe, Recorder(request)
        tokens, mask = positions.tokens(probe, self.request.device), positions.mask(probe, self.request.device)
        with torch.no_grad(), hooked(self.model, recorder), named_hooks(self.model, recorder):
            recorder.returns(self._called(tokens, mask))
        return recorder.reply()

    def _called(self, tokens: Tensor, mask: Tensor | None, **more: Any) -> Any:
        """Return the logits of tokens `[batch pos]`; `mask` has the same shape and is 1 at real tokens, None if all are real."""
        if mask is None:
            return self.model(tokens, return_type="logits", **more)
        tokens = tokens.masked_fill(mask == 0, self.model.tokenizer.pad_token_id)
        side = "left" if bool(mask[:, -1].all()) else "right"
        # Every release stores in its cache the mask that it derives from pad ids; 2.8 does not store a mask that is given.
        if "past_kv_cache" not in more:
            more["attention_mask"] = mask
        return self.model(tokens, return_type="logits", padding_side=side, **more)

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Return greedy completions of one batch."""
        return greedy(request, self._cached(), self.request.device)

    def _cached(self) -> Step:
        """Return a function that runs one step and continues from a KV cache of the release's own class."""
        model, cache = self.model, None

        def step(inputs: StepInputs) -> Any:
            nonlocal cache
            rows, new = inputs.tokens.shape
            cache = cache or _cache_class().init_cache(model.cfg, self.request.device, batch_size=rows)
            mask = None if inputs.mask is None else inputs.mask[:, -new:]  # the cache has the mask of earlier steps
            return self._called(inputs.tokens, mask, past_kv_cache=cache)

        return step

    def replay(self, request: RunRequest, tell: Tell) -> RunReply:
        """Run one probe with sites replaced. Hook points take replacements like any module.

        True float64 is not available here; only the transformers backend has it.
        """
        return self.run(request, tell)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Make edits of the live model. All blocks share `cfg`, but each has its own copy of scales, masks and rotary tables."""
        return self.edits.bring_to(self.model, request.edits)


def _cache_class() -> Any:
    """Return the class of the release's KV cache, which 3.x renamed."""
    try:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
    except ImportError:
        from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache

        return HookedTransformerKeyValueCache
    return TransformerLensKeyValueCache


def official_name(name: str) -> str:
    """Return the name unchanged if this release has a model of that name or alias.

    HookedTransformer has a list of models and loads no other model.

    Raises:
        BackendFailed: the release has no such model; the message has the nearest names.
    """
    from transformer_lens import loading_from_pretrained as tables

    try:
        tables.get_official_model_name(name)
    except ValueError as error:
        near = get_close_matches(name, tables.OFFICIAL_MODEL_NAMES, 3, cutoff=0.4)
        version = importlib.metadata.version("transformer-lens")
        raise BackendFailed(
            f"HookedTransformer of TransformerLens {version} has no model `{name}`; near it are {', '.join(near) or 'none'}",
            code="name-not-in-release",
        ) from error
    return name


def tokenization(model: Any, request: LoadRequest) -> dict[str, list[int]]:
    """Return the ids that the port's own `to_tokens` makes of each text, with the BOS token if the port adds one.

    Chats are tokenized by the template of the port's tokenizer.
    """
    if model.tokenizer is None:
        return {}
    made = {text: model.to_tokens(text)[0].tolist() for text in request.tokenize}
    return made | chat_tokens(model.tokenizer, request.chats)


def load_hf_model(path: str, dtype: str, *, whole: bool = True) -> nn.Module:
    """Return the model of a directory, or of a hub id, as transformers loads it.

    Args:
        path: the directory or hub id.
        dtype: dtype of the weights.
        whole: load a model of several modalities with its head. HookedTransformer takes such a model without its head.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path)
    headless = not whole and text_config(config) is not config
    loader = AutoModel if headless else auto_class(config)
    model: nn.Module = loader.from_pretrained(path, torch_dtype=getattr(torch, dtype))
    return model


@contextmanager
def real_sizes(request: LoadRequest, replaced: dict[str, Any]) -> Iterator[None]:
    """While the context is open, replace sizes in the release's tables by those of the checkpoint, if they differ.

    This is done for a synthetic checkpoint and for one that is loaded under another model's name. Only sizes are replaced, never
    constants. A size that a table leaves out or sets to None (no grouped heads) is not replaced.

    Args:
        request: the request to load, with the sizes of the checkpoint.
        replaced: gets each replaced size with the values of release and checkpoint.
    """
    if request.checkpoint.synthetic is None and "name" not in request.settings:
        yield
        return
    from transformer_lens import loading_from_pretrained as tables

    original, sizes = tables.convert_hf_model_config, request.sizes

    def convert(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(original(*args, **kwargs))
        for ours, theirs in SIZES.items():
            if found.get(ours) is not None and found[ours] != sizes[theirs]:
                replaced[ours] = {"release": found[ours], "checkpoint": sizes[theirs]}
                found[ours] = sizes[theirs]
        if found.get("attn_types") is not None:
            found["attn_types"] = list(found["attn_types"])[: sizes["n_layers"]]
        return found

    tables.convert_hf_model_config = convert
    try:
        yield
    finally:
        tables.convert_hf_model_config = original
