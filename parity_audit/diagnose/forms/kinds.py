"""The descriptions that `forms` tries, one function each. Each returns None, or a `Description` with the share of the
difference that it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from parity_audit.compare.golden import lowest
from parity_audit.core.limits import TINY
from parity_audit.diagnose.forms.grids import EXACT_SHARE, rounded_with_a_scale
from parity_audit.diagnose.forms.order import order_of
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.thresholds import ALIKE, CLEAN, FEWEST_TOKENS, LEFT_OUT, MAJORITY
from parity_audit.formulas.activations import NAMED

MOST_LEFT = 0.02
"""The share of a difference that a description may leave."""
NARROW = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
STEPS = (1, -1, 2, -2)
"""Distances in tokens between a value and the token at which it is found: a cache or a shift that is off by one, or
both by two together."""
OWN_TOKENS = "each token's own"
NORMALISED, CENTRED = "normalised", "centred and "
CURVES = {
    **{name: curve for name, curve in NAMED.items() if name not in ("linear", "none")},
    "square": torch.square,
    "abs": torch.abs,
}
OF_A_TOKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
}


def _zero(pair: ActualExpected) -> Description | None:
    gone = float(pair.own.norm()) == 0.0
    return Description(kind="source", value="zero", usual="as computed", share_left=0.0) if gone else None


def _copied(pair: ActualExpected) -> Description | None:
    for name, other in pair.others.items():
        if (left := pair.share_left(other)) < MOST_LEFT:
            return Description(kind="source", value=f"equal to {name}", usual="as computed", share_left=left)
    return None


def hidden(pair: ActualExpected) -> Description | None:
    """Describe a tensor in which one low number, or -inf, replaces all but the largest entries of each token, as
    samplers do to logits."""
    low = float(pair.own.min())
    gone = pair.own == low
    if low >= float(pair.true.min()) or float(gone.double().mean()) < MAJORITY:
        return None
    kept = (~gone).sum(1)
    few, many = int(kept.min()), int(kept.max())
    count = str(few) if few == many else f"{few} to {many}"
    left = float((pair.own - pair.true)[~gone].norm()) / max(float(pair.true.norm()), TINY)
    return Description(
        kind="hidden", value=f"{low:.4g} but at the {count} largest", usual="as computed", share_left=left
    )


def _constant(pair: ActualExpected) -> Description | None:
    value = float(pair.own.mean())
    even = float((pair.own - value).abs().max()) <= CLEAN * abs(value)
    return Description(kind="constant", value=value, usual="as computed", share_left=0.0) if even else None


def _same_for_all(pair: ActualExpected) -> Description | None:
    """Describe one vector shared by all tokens, or by many (those of a sequence), where the true vectors differ at
    the same precision."""
    held = (
        dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(pair.own.to(dtype).to(pair.own), pair.own)
    )
    dtype = next(held, torch.float32)
    vectors, due = (len(torch.unique(x.to(dtype).float(), dim=0)) for x in (pair.own, pair.true))
    if vectors > due / FEWEST_TOKENS:
        return None
    return Description(
        kind="constant", value=f"{vectors} vectors for {len(pair.own)} tokens", usual="as computed", share_left=0.0
    )


def _projected(pair: ActualExpected) -> Description | None:
    """Describe a tensor without its components in a few directions, which are those of the difference."""
    apart = pair.own - pair.true
    if min(apart.shape) < FEWEST_TOKENS:
        return None
    _, sizes, directions = torch.linalg.svd(apart, full_matrices=False)
    rank = int((sizes > ALIKE * sizes[0]).sum())
    if rank > (1 - LEFT_OUT) * min(apart.shape):
        return None
    v = directions[:rank]
    left = pair.share_left(pair.true - pair.true @ v.T @ v)
    words = f"without {rank} of {apart.shape[1]} directions"
    return Description(kind="projection", value=words, usual="as computed", share_left=left)


def _late(pair: ActualExpected) -> Description | None:
    """Describe tokens that hold the values of one or two tokens before or after them; the ends of sequences need not
    match."""
    size = pair.own.norm(dim=1)
    for step in STEPS:
        near = (pair.own - pair.true.roll(step, 0)).norm(dim=1) <= ALIKE * size
        if float(near.double().mean()) >= 1 - LEFT_OUT:
            return Description(kind="position", value=shift_in_words(step), usual=OWN_TOKENS, share_left=0.0)
    return None


def shift_in_words(step: int) -> str:
    """Return words for the tokens whose values are found in the place of each token's own: `step` before it, or
    after it if negative."""
    return f"those of {abs(step)} {'before' if step > 0 else 'after'}"


def _rounded(pair: ActualExpected) -> Description | None:
    for name, dtype in NARROW.items():
        if float(pair.own.abs().max()) > torch.finfo(dtype).max:
            continue
        exact = (pair.own == pair.own.to(dtype).double()).double().mean()
        near = (pair.own - pair.true).abs() <= torch.finfo(dtype).eps * pair.true.abs() + torch.finfo(dtype).tiny
        if float(exact) >= EXACT_SHARE and float(near.double().mean()) >= EXACT_SHARE:
            return Description(kind="rounded", value=name, usual="full", share_left=0.0)
        if (left := pair.share_left(pair.true.to(dtype).double())) < MOST_LEFT:
            return Description(kind="rounded", value=name, usual="full", share_left=left)
    return None


def _scaled(pair: ActualExpected) -> Description | None:
    factor = float((pair.own * pair.true).sum() / pair.true.square().sum().clamp_min(TINY))
    return Description(kind="scale", value=factor, usual=1.0, share_left=pair.share_left(factor * pair.true))


def _shifted(pair: ActualExpected) -> Description | None:
    shift = float((pair.own - pair.true).mean())
    return Description(kind="shift", value=shift, usual=0.0, share_left=pair.share_left(pair.true + shift))


def clamped(pair: ActualExpected) -> Description | None:
    """Describe values bounded by the smallest and the largest value of the candidate, if true values lie beyond
    these."""
    low, high = float(pair.own.min()), float(pair.own.max())
    used = [bound for bound, hit in ((low, pair.true.min() < low), (high, pair.true.max() > high)) if bool(hit)]
    form = Description(kind="clamp", value=used, usual=None, share_left=pair.share_left(pair.true.clamp(low, high)))
    return form if used else None


def _capped(pair: ActualExpected) -> Description | None:
    """Describe a soft-cap c, found by golden section in log c. A cap far above the values has no effect and is not
    searched."""
    top = float(pair.own.abs().max())
    if top == 0.0 or float(pair.true.abs().max()) <= top:
        return None

    def left(log_cap: float) -> float:
        cap = top * 2.0**log_cap
        return pair.share_left(cap * torch.tanh(pair.true / cap))

    # tanh x is about x - x^3 / 3: the upper end is the cap, relative to the largest value, at which the cube is rounding.
    best = lowest(left, 0.0, -0.5 * math.log2(3 * CLEAN))
    return Description(kind="softcap", value=top * 2.0**best, usual=None, share_left=left(best))


def ordered(pair: ActualExpected) -> Description | None:
    """Describe a tensor whose channels are in another order, see `order_of`."""
    found = order_of(pair.own, pair.true, pair.d_head)
    if found is None:
        return None
    words, permutation = found
    return Description(
        kind="order", value=words, usual="as computed", share_left=pair.share_left(pair.true[:, permutation])
    )


def _one_added(pair: ActualExpected) -> Description | None:
    """Describe the true value plus a multiple of one site. If several sites fit (they are multiples of each other),
    take the one whose factor is nearest to 1 or -1."""
    found = []
    for name, x in pair.others.items():
        factor = float(((pair.own - pair.true) * x).sum() / x.square().sum().clamp_min(TINY))
        left = pair.share_left(pair.true + factor * x)
        if left < MOST_LEFT and factor != 0.0:
            found.append(
                (
                    abs(math.log(abs(factor))),
                    f"the true value {'+' if factor > 0 else '-'} {abs(factor):.4g} {name}",
                    left,
                )
            )
    if not found:
        return None
    _, said, left = min(found, key=lambda one: one[0])
    return Description(kind="source", value=said, usual="as computed", share_left=left)


def _plainly_summed(pair: ActualExpected) -> Description | None:
    """Describe a plain sum of two or three sites. Of sites with equal contents, take those nearest to this one."""
    for count in (2, 3):
        for names in combinations(reversed(list(pair.others)), count):
            left = pair.share_left(torch.stack([pair.others[name] for name in names]).sum(0))
            if left < MOST_LEFT:
                return Description(
                    kind="source", value=" + ".join(reversed(names)), usual="as computed", share_left=left
                )
    return None


def _summed(pair: ActualExpected) -> Description | None:
    """Describe a weighted sum of the true value and the sites before it, by least squares; terms with a negligible
    weight are left out."""
    others = {name: x for name, x in pair.others.items() if float((x - pair.true).norm()) > CLEAN * float(x.norm())}
    names, columns = ["the true value", *others], [pair.true, *others.values()]
    if not others:
        return None
    x = torch.stack([column.flatten() for column in columns], 1)
    sizes = x.norm(dim=0).clamp_min(TINY)
    weights = torch.linalg.lstsq(x / sizes, pair.own.flatten()[:, None], driver="gelsd").solution[:, 0]
    keep = weights.abs() > ALIKE * weights.abs().max()
    again = torch.linalg.lstsq(x[:, keep], pair.own.flatten()[:, None], driver="gelsd").solution[:, 0]
    terms = [f"{float(b):.4g} {name}" for b, name in zip(again, _kept(names, keep), strict=True)]
    guess = (x[:, keep] @ again).view_as(pair.own)
    return Description(kind="source", value=" + ".join(terms), usual="as computed", share_left=pair.share_left(guess))


def _kept(names: list[str], keep: Tensor) -> list[str]:
    return [name for name, kept in zip(names, keep.tolist(), strict=True) if kept]


def _gain(own: Tensor, true: Tensor) -> Tensor:
    """Return the factor of each column by which `true` `[row, column]` is nearest to `own`, by least squares."""
    return (own * true).sum(0) / true.square().sum(0).clamp_min(TINY)


def _gained(pair: ActualExpected) -> Description | None:
    if len(pair.own) < FEWEST_TOKENS:
        return None
    gain = _gain(pair.own, pair.true)
    said = f"{float(gain.min()):.4g} to {float(gain.max()):.4g} per channel"
    return Description(kind="gain", value=said, usual=1.0, share_left=pair.share_left(pair.true * gain))


def _biased(pair: ActualExpected) -> Description | None:
    if len(pair.own) < FEWEST_TOKENS:
        return None
    bias = (pair.own - pair.true).mean(0)
    said = f"rms {float(bias.square().mean().sqrt()):.4g} per channel"
    return Description(kind="bias", value=said, usual=0.0, share_left=pair.share_left(pair.true + bias))


def _curved(pair: ActualExpected) -> Description | None:
    """Describe each number as one function of its true value, or of all true values of its token."""
    left, name = min((pair.share_left(curve(pair.true)), name) for name, curve in (CURVES | OF_A_TOKEN).items())
    return Description(kind="curve", value=name, usual="as computed", share_left=left)


def _normed(pair: ActualExpected) -> Description | None:
    return None if pair.true.shape[1] < FEWEST_TOKENS else _by_size(pair, pair.own, pair.true, "")


def _normed_heads(pair: ActualExpected) -> Description | None:
    width = pair.d_head
    if width < FEWEST_TOKENS or pair.true.shape[1] % width or pair.true.shape[1] == width:
        return None
    return _by_size(pair, pair.own.reshape(-1, width), pair.true.reshape(-1, width), "each head ")


def _by_size(pair: ActualExpected, own: Tensor, true: Tensor, who: str) -> Description:
    """Describe each row as a factor times the true row, with or without the row's mean subtracted."""
    return min((_by_rms(pair, own, x, who + said) for said, x in
                (("", true), (CENTRED, true - true.mean(1, keepdim=True)))), key=lambda form: form.share_left)  # fmt: skip


def _by_rms(pair: ActualExpected, own: Tensor, true: Tensor, who: str) -> Description:
    """Describe a factor per row: as a normalisation if all rows get the same RMS, else as a range of factors."""
    size = true.square().sum(1, keepdim=True).clamp_min(TINY)
    scale = (own * true).sum(1, keepdim=True) / size
    rms = (scale.squeeze(1) * (size.squeeze(1) / true.shape[1]).sqrt()).abs()
    even = float(rms.std()) < ALIKE * float(rms.mean()) if len(rms) > 1 else False
    least, most = (f"{float(x):.4g}" for x in (scale.min(), scale.max()))
    if even:
        words = f"{who}{NORMALISED} to rms {float(rms.mean()):.4g}"
    elif who.endswith(CENTRED) and least == most == "1":
        words = who.removesuffix(" and ")
    else:
        words = f"{who}scaled by {least} to {most} per token"
    return Description(
        kind="norm", value=words, usual="as computed", share_left=pair.share_left((scale * true).view_as(pair.own))
    )


def _normed_with_gain(pair: ActualExpected) -> Description | None:
    """Describe heads, or whole tokens, that are normalised to one size and then multiplied by a factor per
    component."""
    found = []
    for width, who in ((pair.d_head, "each head "), (pair.true.shape[1], "")):
        if width < FEWEST_TOKENS or pair.true.shape[1] % width or len(pair.own) < FEWEST_TOKENS:
            continue
        rows = pair.true.reshape(-1, width)
        unit = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
        gain = _gain(pair.own.reshape(-1, width), unit)
        words = f"{who}{NORMALISED}, times {float(gain.min()):.4g} to {float(gain.max()):.4g} per channel"
        found.append(
            Description(
                kind="norm",
                value=words,
                usual="as computed",
                share_left=pair.share_left((unit * gain).view_as(pair.own)),
            )
        )
    return min(found, key=lambda form: form.share_left, default=None)


def _evenly_normed(pair: ActualExpected) -> Description | None:
    """Describe tokens or heads that are all normalised to one size."""
    found = [
        form for form in (_normed(pair), _normed_heads(pair)) if form is not None and NORMALISED in str(form.value)
    ]
    return min(found, key=lambda form: form.share_left, default=None)


Maker = Callable[[ActualExpected], "Description | None"]
FEW_NUMBERS: tuple[Maker, ...] = (
    _zero, _late, _copied, _constant, _same_for_all, _rounded, rounded_with_a_scale, _scaled, _shifted, clamped, _capped,
    _curved, _evenly_normed,
)  # fmt: skip
"""Descriptions with a number or two. The one with the smallest residual is right; of those with about as small a
residual, the first."""
MANY_NUMBERS: tuple[Maker, ...] = (
    _biased,
    _one_added,
    _gained,
    _normed_with_gain,
    _normed,
    _normed_heads,
    _plainly_summed,
    _projected,
    _summed,
)
"""Descriptions with a number for each channel, token or site: the first that fits is right."""
