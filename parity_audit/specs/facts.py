"""Resolve a spec and a config to the `DecoderFacts` that the formulas take as input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parity_audit.core.types import DecoderFacts
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import dims, knob_values, roles


def decoder_facts(spec: Spec, config: Mapping[str, Any]) -> DecoderFacts:
    """Return the sizes, the knob values per layer, and the checkpoint tensor of every role.

    Raises:
        ExprError: an expression of the spec cannot be evaluated on this config.
    """
    sizes = dims(spec, config)
    layers = range(sizes["n_layers"])
    outside = roles(spec, config, None)
    own = [{role: tap for role, tap in roles(spec, config, layer).items() if role not in outside} for layer in layers]
    values = {knob: [item.at(layer) for layer in layers] for knob, item in knob_values(spec, config).items()}
    tied = bool(config.get("tie_word_embeddings", True))
    return DecoderFacts(dims=sizes, values=values, outside=outside, blocks=tuple(own), tied=tied)
