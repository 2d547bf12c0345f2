"""Norms with the knobs and tensors of a decoder.

The knobs `norm.*` are for norms of the residual stream and of the inputs and outputs of its sublayers, the knobs `qk_norm.*` for
norms of queries, keys and their latents.
"""

from __future__ import annotations

from torch import Tensor

from parity_audit.formulas import norms
from parity_audit.formulas.choices import (
    AFTER_SUM,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    NONE,
    ON_ATTENTION,
    ON_MLP,
    OWN,
    POST,
    TWICE,
)
from parity_audit.formulas.place import FormulaContext

ELSEWHERE = {
    "ln1.out": {AFTER_SUM: ("resid_pre", "attn_proj"), ON_ATTENTION: ("attn_proj",)},
    "ln2.out": {AFTER_SUM: ("ln1.out", "mlp_proj"), ON_MLP: ("mlp_proj",)},
    "ln1_post.out": {AFTER_SUM: ("resid_pre", "attn_proj"), BEFORE_ATTENTION: ("resid_pre",)},
    "ln2_post.out": {AFTER_SUM: ("resid_mid", "mlp_proj"), BEFORE_MLP: ("resid_mid",)},
}
"""The sites whose sum is the input of a norm, by the norm's site and by the value of `norm.order`, if it is not the usual input."""


def read_by_norm(at: FormulaContext, site: str, usual: str) -> Tensor:
    """Return the input of the norm that makes a site, `[batch pos d_model]`; `usual` is the site that it usually reads."""
    sites = ELSEWHERE.get(site, {}).get(at.knob("norm.order"), (usual,))
    first, *rest = (at.entering() if name == "resid_pre" else at.site(name) for name in sites)
    return sum(rest, start=first)


def read_by_sublayers(at: FormulaContext) -> bool:
    """Whether the sublayers read the stream itself, without a norm before them."""
    return at.knob("norm.order") in (POST, AFTER_SUM)


def normed(at: FormulaContext, x: Tensor, role: str) -> Tensor:
    """Return x `[batch pos d_model]`, normalised by the norm whose weight and bias have this role, with the knobs `norm.*`."""
    return norms.norm(x, *tensors_of(at, "norm", role), kind_of(at, "norm"))


def kind_of(at: FormulaContext, prefix: str) -> norms.Norm:
    """Return the norm that the knobs of one group (`norm` or `qk_norm`) describe."""
    return norms.Norm(
        kind=at.knob(f"{prefix}.kind"), eps=at.knob(f"{prefix}.eps"), offset=at.knob(f"{prefix}.offset"),
        eps_place=at.knob(f"{prefix}.eps_place"), size=at.knob(f"{prefix}.size"), gain=at.knob(f"{prefix}.gain"),
        times=at.knob(f"{prefix}.times"), arithmetic=at.knob(f"{prefix}.dtype"),
    )  # fmt: skip


def tensors_of(at: FormulaContext, prefix: str, role: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias that the norm of this role uses by the knobs of its group; None for what it does not use.

    Raises:
        ValueError: the knob asks for another weight than the norm's own, but names this same norm, or the norm has no own weight.
    """
    own, whose = at.weight(role), at.knob(f"{prefix}.weight")
    bias = at.multiple(f"{role}.bias", at.knob(f"{prefix}.bias"))
    if whose == OWN:
        return own, bias
    if own is None or whose == role:
        raise ValueError(f"the weight of {role} is asked for in place of its own, or in place of none")
    if whose == NONE:
        return None, bias
    return own.square() if whose == TWICE else at.tensor(whose), bias
