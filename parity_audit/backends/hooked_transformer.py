"""TransformerLens 2.x and 3.x: HookedTransformer. Hook points are modules, so ordinary hooks see them.

Loaded without weight processing unless settings ask for it (`fold_ln=true`, `center_unembed=true` ...):
what is audited is the function, and the processing is a separate question.
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
from parity_audit.backends.prints import fingerprints
from parity_audit.backends.processing import of_hooked_transformer
from parity_audit.backends.reach import run_as_far_as_it_goes
from parity_audit.backends.taps import Recorder, hooked
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
    """HookedTransformer.from_pretrained_no_processing by the name a user would type."""

    request: LoadRequest
    model: Any

    def __init__(self) -> None:
        self.edits = LiveEdits()
        self.replaced: dict[str, Any] = {}

    def prepare(self, request: LoadRequest) -> None:
        """Import the release."""
        importlib.import_module("transformer_lens")

    def load(self, request: LoadRequest) -> None:
        """Load; for a synthetic checkpoint, sizes that the release hard-codes by name are replaced."""
        import transformer_lens

        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.request = request
        settings = {key: value for key, value in request.settings.items() if key not in HARNESS_SETTINGS}
        name = official_name(str(request.settings.get("name", request.checkpoint.repo_id)))
        weights = load_name(request.checkpoint)
        if weights != name:
            settings["hf_model"] = load_hf_model(weights, request.dtype, whole=False)
            settings["tokenizer"] = own_tokenizer(weights)  # where it is None the release takes that of the name
        with real_sizes(request, self.replaced):
            self.model = transformer_lens.HookedTransformer.from_pretrained_no_processing(
                name, device=request.device, dtype=getattr(torch, request.dtype), **settings
            )
        self.model.eval()

    def describe(self) -> Description:
        """Versions, live knob values, and the port's own context limit."""
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
        """Fingerprints of the live parameters."""
        return fingerprints(self.model, request)

    def run(self, request: RunRequest, tell: Tell) -> RunReply:
        """One forward pass over as many positions as the port takes, or one per token where the cache is asked for."""
        if request.in_steps:
            return decode(request, self.model, self._cached(), self.request.device)
        return run_as_far_as_it_goes(request, self.model.cfg.n_ctx, self._whole)

    def _whole(self, request: RunRequest) -> RunReply:
        """One forward pass.

        Releases before 2.4 ignore `attention_mask` for token input and look for the tokenizer's pad id instead,
        so padded rows carry both.
        """
        probe, recorder = request.probe, Recorder(request)
        tokens, mask = positions.tokens(probe, self.request.device), positions.mask(probe, self.request.device)
        with torch.no_grad(), hooked(self.model, recorder), named_hooks(self.model, recorder):
            recorder.returns(self._called(tokens, mask))
        return recorder.reply()

    def _called(self, tokens: Tensor, mask: Tensor | None, **more: Any) -> Any:
        """The logits of tokens `[batch pos]`, of which the mask of that shape says which are real; None where all are."""
        if mask is None:
            return self.model(tokens, return_type="logits", **more)
        tokens = tokens.masked_fill(mask == 0, self.model.tokenizer.pad_token_id)
        side = "left" if bool(mask[:, -1].all()) else "right"
        # Every release keeps in its cache what pad ids say; 2.8 does not keep a mask that it is given.
        if "past_kv_cache" not in more:
            more["attention_mask"] = mask
        return self.model(tokens, return_type="logits", padding_side=side, **more)

    def sample(self, request: SampleRequest, tell: Tell) -> SampleReply:
        """Greedy completions of one batch."""
        return greedy(request, self._cached(), self.request.device)

    def _cached(self) -> Step:
        """Goes on from a cache of the release's own kind."""
        model, cache = self.model, None

        def step(inputs: StepInputs) -> Any:
            nonlocal cache
            rows, new = inputs.tokens.shape
            cache = cache or _cache_class().init_cache(model.cfg, self.request.device, batch_size=rows)
            mask = None if inputs.mask is None else inputs.mask[:, -new:]  # the cache keeps that of earlier steps
            return self._called(inputs.tokens, mask, past_kv_cache=cache)

        return step

    def replay(self, request: RunRequest, tell: Tell) -> RunReply:
        """Hook points take replacements like any module; true float64 is the transformers backend's."""
        return self.run(request, tell)

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Live edits. `cfg` is shared by all blocks, but scales, masks and rotary tables are copies in each."""
        return self.edits.bring_to(self.model, request.edits)


def _cache_class() -> Any:
    """The release's key-value cache: a class of 2.x that 3.x renamed."""
    try:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
    except ImportError:
        from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache

        return HookedTransformerKeyValueCache
    return TransformerLensKeyValueCache


def official_name(name: str) -> str:
    """The name, where this release has it or an alias of it. Raises BackendFailed with the nearest names where it has none.

    HookedTransformer keeps a list of models and loads nothing else.
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
    """Ids as the port's own `to_tokens` makes them, BOS habits included; chats by its tokenizer's template."""
    if model.tokenizer is None:
        return {}
    made = {text: model.to_tokens(text)[0].tolist() for text in request.tokenize}
    return made | chat_tokens(model.tokenizer, request.chats)


def load_hf_model(path: str, dtype: str, *, whole: bool = True) -> nn.Module:
    """A directory's model as transformers loads it.

    Args:
        whole: with the head of a model of several modalities. HookedTransformer takes such a model without it.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path)
    headless = not whole and text_config(config) is not config
    loader = AutoModel if headless else auto_class(config)
    model: nn.Module = loader.from_pretrained(path, torch_dtype=getattr(torch, dtype))
    return model


@contextmanager
def real_sizes(request: LoadRequest, replaced: dict[str, Any]) -> Iterator[None]:
    """Sizes of a synthetic checkpoint, or of one under another's name, where the release's tables have others.

    Constants are never touched.

    A size that a table leaves out or sets to None (no grouped heads) is the release's own business.
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
