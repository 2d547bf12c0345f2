"""What a model of transformers is given to go on from the tokens that it has seen: the cache that it made itself, or where that has
no room for more, the one that `generate` prepares.

Releases 4.42 to 4.52 keep the keys and values of models with windowed layers (Gemma 2 and 3, Cohere 2, Llama 4) in a cache of a
fixed length. `generate` makes it, long enough for the whole text; a plain call of the model makes none, or one that holds the
tokens of that call alone. Its last place matters: up to 4.51 the cache loses its oldest key when that is filled.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parity_audit.backends.decoding import StepInputs
from parity_audit.backends.loading import text_config

HYBRID = "hybrid"
"""Keys and values of windowed layers as far as the window reaches, those of the others whole."""


class Continued:
    """The cache of one text or batch, from step to step. It is made before any hook is set: the model may be run for it."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model, self.device = model, device
        self.fixed = _fixed(model, device)
        self.cache: Any = None
        self.done = 0

    def given(self, inputs: StepInputs) -> dict[str, Any]:
        """What the next step takes beside its tokens."""
        rows, new = inputs.tokens.shape
        start, self.done = self.done, self.done + new
        if self.fixed is None:
            return inputs.padding | ({} if self.cache is None else {"past_key_values": self.cache})
        if self.cache is None:
            dtype = next(self.model.parameters()).dtype
            config: Any = text_config(self.model.config)
            self.cache = self.fixed(config, rows, inputs.length + _spare(), device=self.device, dtype=dtype)
        at = torch.arange(start, self.done, device=self.device)
        mask = torch.ones(rows, self.done, dtype=torch.long, device=self.device)  # which a plain call may do without
        return {"attention_mask": mask} | inputs.padding | {"past_key_values": self.cache, "cache_position": at}

    def keep(self, returned: Any) -> None:
        """Take the cache that a step returned beside its logits.

        Raises:
            NotImplementedError: it returned none.
        """
        self.cache = getattr(returned, "past_key_values", None)
        if self.cache is None:
            raise NotImplementedError("asked for its cache, the model returned none")


def _fixed(model: nn.Module, device: str) -> Any | None:
    """The class of the fixed cache that the model needs; None where it makes one that grows, which is told by a run of one token."""
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
    """Places that `generate` leaves empty: older releases have one for the token that it chooses last, which is not run."""
    from transformers import GenerationMixin

    return 0 if "max_length - 1" in inspect.getsource(GenerationMixin.generate) else 1
