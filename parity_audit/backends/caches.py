"""The KV cache with which a transformers model continues after the tokens that it has seen.

It is the cache that the model made itself. If that cache has no room for more tokens, it is one like `generate` prepares.

transformers 4.42 to 4.52 keep the keys and values of models with windowed layers (Gemma 2 and 3, Cohere 2, Llama 4) in a cache
of fixed length. `generate` makes this cache long enough for the whole text. A plain call of the model makes no cache, or one
that holds only the tokens of that call. The length has to match that of `generate`: up to 4.51 the cache loses its oldest key
when its last place is filled.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parity_audit.backends.decoding import StepInputs
from parity_audit.backends.loading import text_config

HYBRID = "hybrid"
"""Value of `cache_implementation`: windowed layers keep the keys and values of their window, other layers keep all of them."""


class Continued:
    """Holds the KV cache of one text or batch from step to step.

    Make this object before any hook is set, because its constructor may run the model.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model, device
        self.fixed = _fixed(model, device)
        self.cache: Any = None
        self.done = 0

    def given(self, inputs: StepInputs) -> dict[str, Any]:
        """Return the arguments of the next step's call other than its tokens: cache, masks and positions."""
        rows, new = inputs.tokens.shape
        start, self.done = self.done, self.done + new
        if self.fixed is None:
            return inputs.padding | ({} if self.cache is None else {"past_key_values": self.cache})
        if self.cache is None:
            dtype = next(self.model.parameters()).dtype
            config: Any = text_config(self.model.config)
            self.cache = self.fixed(config, rows, inputs.length + _spare(), device=self.device, dtype=dtype)
        at = torch.arange(start, self.done, device=self.device)
        # A plain call does not always need a mask; a call with a prepared cache does.
        mask = torch.ones(rows, self.done, dtype=torch.long, device=self.device)
        return {"attention_mask": mask} | inputs.padding | {"past_key_values": self.cache, "cache_position": at}

    def keep(self, returned: Any) -> None:
        """Store the cache that a step returned together with its logits.

        Raises:
            NotImplementedError: the step returned no cache.
        """
        self.cache = getattr(returned, "past_key_values", None)
        if self.cache is None:
            raise NotImplementedError("asked for its cache, the model returned none")


def _fixed(model: nn.Module, device: str) -> Any | None:
    """Return the class of the fixed-length cache that the model needs, None if the model makes a growing cache itself.

    A run of one token decides: a cache made for that call with room for one token only is of fixed length.
    """
    from transformers import cache_utils

    kind = getattr(text_config(model.config), "cache_implementation", None)
    hybrid = getattr(cache_utils, "HybridCache", None)
    if kind is None or hybrid is None:
        return None
    with torch.no_grad():
        returned = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True)
    own = getattr(returned, "past_key_values", None)
    if own is None:
        return hybrid if kind == HYBRID else None
    return type(own) if getattr(own, "max_cache_len", None) == 1 else None


def _spare() -> int:
    """Return how many places of the cache `generate` leaves empty.

    It is 1 in older releases, which reserve a place for the last chosen token although that token is never run, else 0.
    """
    from transformers import GenerationMixin

    return 0 if "max_length - 1" in inspect.getsource(GenerationMixin.generate) else 1
