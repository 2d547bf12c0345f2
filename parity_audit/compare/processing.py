"""Compare processed weights: they compute the same function, and are compared in the coordinates that both sides share.

TransformerLens rewrites weights on request. These are the effects on the sites, in a model that a rewriting is meant
for:

    fold_ln                          norms lose gain and bias (they move into the next weights)
    center_writing_weights           what is written to the stream loses its mean over d_model, which LayerNorm ignores
    center_unembed                   logits lose their mean over the vocabulary, which a softmax ignores
    fold_value_biases                v and z lose the value bias (attention's output bias has it instead)
    refactor_factored_attn_matrices  q, k, v and z are rotated and scaled

So these sites are compared after the mean is removed from both sides, or they are not compared. A soft-cap on the
logits depends on the mean, so in a model with one, no difference of the logits is allowed for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from parity_audit.compare.source import View
from parity_audit.core.sites import LOGITS, RETURNED, local_name
from parity_audit.core.types import KnobValue, NotTested, WeightPrint

STREAM = (
    "embed", "pos_embed", "resid_pre", "attn_proj", "attn_out", "resid_mid", "mlp_proj", "mlp_out", "resid_post",
)  # fmt: skip
NORMS, VALUES, FACTORS = ("ln1.out", "ln2.out", "ln_final.out"), ("v", "z"), ("q", "k", "rot_q", "rot_k", "v", "z")


class Knob(Protocol):
    """The spec's entry for a constant."""

    @property
    def value(self) -> KnobValue:
        """The value in the layers to which it applies."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Sites that are compared without their mean over the last axis, and sites that are not compared, with the reason.

    `weights`: the fingerprints that the processed tensors must have, if they are known.
    """

    processing: tuple[str, ...]
    centred: frozenset[str] = frozenset()
    dropped: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[WeightPrint, ...] | None = None

    def gaps(self) -> list[NotTested]:
        """The gaps: the sites that are not compared, and the weights if their fingerprints are not known."""
        sites = [NotTested(what=site, why=why) for site, why in self.dropped.items()]
        if self.weights is not None:
            return sites
        why = "they are processed (" + ", ".join(self.processing) + ") and cannot be the checkpoint's"
        return [*sites, NotTested(what="weights, tensor by tensor", why=why)]

    def words(self) -> str:
        """One line for the report."""
        shifted = " Logits are compared up to a constant per token." if LOGITS in self.centred else ""
        return f"weights are processed: {', '.join(self.processing)}.{shifted}"


def allowance(
    processing: Collection[str], knobs: Mapping[str, Knob], weights: tuple[WeightPrint, ...] | None = None
) -> Allowance | None:
    """The differences that processed weights may cause in an architecture; None if nothing is processed."""
    if not processing:
        return None
    said = {name: knob.value for name, knob in knobs.items()}
    centred: set[str] = set()
    dropped: dict[str, str] = {}
    if "center_writing_weights" in processing and said.get("norm.kind") == "layer":
        centred |= set(STREAM)
    if "center_unembed" in processing and said.get("logits.softcap") is None:
        centred |= {LOGITS, RETURNED}
    if "fold_ln" in processing:
        dropped |= dict.fromkeys(NORMS, "fold_ln moved its gain into the next weights")
    if "fold_value_biases" in processing and said.get("attention.v_bias"):
        dropped |= dict.fromkeys(VALUES, "fold_value_biases moved the value bias behind the attention")
    if "refactor_factored_attn_matrices" in processing:
        dropped |= dict.fromkeys(FACTORS, "refactor_factored_attn_matrices changed its basis")
    return Allowance(processing=tuple(processing), centred=frozenset(centred), dropped=dropped, weights=weights)


@dataclass(frozen=True)
class Allowed(View):
    """A capture without the sites that an allowance drops, and without the means that it ignores."""

    allowance: Allowance

    def sites(self, probe: str) -> set[str]:
        """The sites that can be compared."""
        return {site for site in self.source.sites(probe) if local_name(site) not in self.allowance.dropped}

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1; in float64 and without its mean where the mean is ignored."""
        value = self.source.rows(probe, site, start, stop)
        if local_name(site) not in self.allowance.centred:
            return value
        value = value.double()
        return value - value.mean(-1, keepdim=True)
