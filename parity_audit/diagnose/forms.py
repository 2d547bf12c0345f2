"""What a component made of its inputs, in words, where no constant of the spec explains it.

The judge replays the candidate's own inputs, so `true` is what a site should hold and `own` what it holds, both
`[token, channel]`. The shortest of these descriptions that turns one into the other is the finding:

    another site's values, or a sum of such   own = sum_s b_s site_s
    rounded                                   own = round(true) in a narrow dtype
    scale, shift                              own = a true,  own = true + b
    clamp, softcap                            own = min(max(true, lo), hi),  own = c tanh(true / c)
    order                                     own = true with its channels permuted
    gain, bias                                own = g_d true,  own = true + b_d     (per channel)
    norm                                      own = s_n true                        (per token)

Where only some tokens or channels differ, the rest is left out and said. A description counts when it leaves less
than `LEFT` of the difference; otherwise the component stays unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.forms_order import order_of

LEFT = 0.02
SAME = 1e-5
SOME = 0.98
MOST = 0.5
FEW = 24
NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
EXACT_SHARE = 0.999
CAP_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Form:
    """A description: what kind, the value that the candidate has, the one it should have, and what is left over."""

    kind: str
    value: KnobValue
    usual: KnobValue
    left: float
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`own` and `true` `[token, channel]` in float64; `others` are sites before this one, of the same shape."""

    own: Tensor
    true: Tensor
    d_head: int
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def apart(self) -> float:
        """The size of the difference."""
        return float((self.own - self.true).norm())

    def left(self, guess: Tensor) -> float:
        """The share of the difference that a guess at `own` leaves."""
        return float((self.own - guess).norm()) / max(self.apart, 1e-300)

    def at(self, tokens: Tensor, channels: Tensor) -> Pair:
        """Only these tokens and channels."""

        def cut(x: Tensor) -> Tensor:
            return x[tokens][:, channels]

        return Pair(
            own=cut(self.own), true=cut(self.true), d_head=self.d_head,
            others={name: cut(x) for name, x in self.others.items()},
        )  # fmt: skip


def described(pair: Pair) -> Form | None:
    """The first description that fits, None where none does. Tensors that do not differ have none."""
    scale = max(float(pair.true.norm()), float(pair.own.norm()))
    if pair.apart <= SAME * scale or not bool(torch.isfinite(pair.own).all() & torch.isfinite(pair.true).all()):
        return None
    moved = _ordered(pair)  # before channels that stay where they were are left out
    if moved is not None and moved.left < LEFT:
        return moved
    part, where = _where_it_differs(pair)
    for maker in MAKERS:
        form = maker(part)
        if form is not None and form.left < LEFT:
            return Form(kind=form.kind, value=form.value, usual=form.usual, left=form.left, where=where)
    return None


def _where_it_differs(pair: Pair) -> tuple[Pair, str]:
    """The tokens and channels that differ, and words for them where they are not all."""
    wrong = (pair.own - pair.true).abs() > 1e-4 * pair.true.square().mean().sqrt()
    tokens, channels = wrong.any(1), _whole_heads(wrong.any(0), pair.d_head)
    said = []
    if int(channels.sum()) < SOME * len(channels):
        said.append(_channels(channels, pair.d_head))
    else:
        channels = torch.ones_like(channels)
    if int(tokens.sum()) < SOME * len(tokens):
        said.append(f"{int(tokens.sum())} of {len(tokens)} tokens")
    else:
        tokens = torch.ones_like(tokens)
    return (pair.at(tokens, channels), ", ".join(said)) if said else (pair, "")


def _whole_heads(wrong: Tensor, d_head: int) -> Tensor:
    """The channels; those of whole heads where most channels of some heads differ and none of the others."""
    if not d_head or len(wrong) % d_head:
        return wrong
    share = wrong.view(-1, d_head).double().mean(1)
    return (share > 0).repeat_interleave(d_head) if bool(((share == 0) | (share >= MOST)).all()) else wrong


def _channels(wrong: Tensor, d_head: int) -> str:
    """Channels in words: a few, a range, or whole heads."""
    found = [int(i) for i in wrong.nonzero()[:, 0]]
    if d_head and len(wrong) % d_head == 0:
        by_head = wrong.view(-1, d_head)
        if bool((by_head.all(1) | ~by_head.any(1)).all()):
            return f"heads {', '.join(str(int(i)) for i in by_head.any(1).nonzero()[:, 0])}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"channels {found[0]} to {found[-1]}"
    return f"channels {', '.join(map(str, found))}" if len(found) <= FEW else f"{len(found)} of {len(wrong)} channels"


def _copied(pair: Pair) -> Form | None:
    if float(pair.own.norm()) == 0.0:
        return Form(kind="source", value="zero", usual="as computed", left=0.0)
    for name, other in pair.others.items():
        if (left := pair.left(other)) < LEFT:
            return Form(kind="source", value=f"equal to {name}", usual="as computed", left=left)
    return None


def _rounded(pair: Pair) -> Form | None:
    for name, dtype in NARROW.items():
        if float(pair.own.abs().max()) > torch.finfo(dtype).max:
            continue
        exact = (pair.own == pair.own.to(dtype).double()).double().mean()
        near = (pair.own - pair.true).abs() <= torch.finfo(dtype).eps * pair.true.abs() + torch.finfo(dtype).tiny
        if float(exact) >= EXACT_SHARE and float(near.double().mean()) >= EXACT_SHARE:
            return Form(kind="rounded", value=name, usual="full", left=0.0)
    return None


def _scaled(pair: Pair) -> Form | None:
    factor = float((pair.own * pair.true).sum() / pair.true.square().sum().clamp_min(1e-300))
    return Form(kind="scale", value=factor, usual=1.0, left=pair.left(factor * pair.true))


def _shifted(pair: Pair) -> Form | None:
    shift = float((pair.own - pair.true).mean())
    return Form(kind="shift", value=shift, usual=0.0, left=pair.left(pair.true + shift))


def _clamped(pair: Pair) -> Form | None:
    low, high = float(pair.own.min()), float(pair.own.max())
    used = [bound for bound, hit in ((low, pair.true.min() < low), (high, pair.true.max() > high)) if bool(hit)]
    form = Form(kind="clamp", value=used, usual=None, left=pair.left(pair.true.clamp(low, high)))
    return form if used else None


def _capped(pair: Pair) -> Form | None:
    """c by golden section in log c; a cap far above the values does nothing."""
    top = float(pair.own.abs().max())
    if top == 0.0 or float(pair.true.abs().max()) <= top:
        return None

    def left(log_cap: float) -> float:
        cap = top * 2.0**log_cap
        return pair.left(cap * torch.tanh(pair.true / cap))

    low, high, golden = 0.0, 8.0, 0.6180339887498949
    for _ in range(CAP_STEPS):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if left(a) < left(b) else (a, high)
    best = (low + high) / 2
    return Form(kind="softcap", value=top * 2.0**best, usual=None, left=left(best))


def _ordered(pair: Pair) -> Form | None:
    found = order_of(pair.own, pair.true, pair.d_head)
    if found is None:
        return None
    words, permutation = found
    return Form(kind="order", value=words, usual="as computed", left=pair.left(pair.true[:, permutation]))


def _one_added(pair: Pair) -> Form | None:
    """The true value plus a multiple of one site: of several that would do (they are multiples of each other), the one
    whose factor is nearest to 1 or -1."""
    found = []
    for name, x in pair.others.items():
        factor = float(((pair.own - pair.true) * x).sum() / x.square().sum().clamp_min(1e-300))
        left = pair.left(pair.true + factor * x)
        if left < LEFT and factor != 0.0:
            found.append(
                (
                    abs(math.log(abs(factor))),
                    f"the true value {'+' if factor > 0 else '-'} {abs(factor):.4g} {name}",
                    left,
                )
            )
    if not found:
        return None
    _, said, left = min(found)
    return Form(kind="source", value=said, usual="as computed", left=left)


def _summed(pair: Pair) -> Form | None:
    """Least squares over the true value and the sites before it; only what has a share of its own is named."""
    others = {name: x for name, x in pair.others.items() if float((x - pair.true).norm()) > SAME * float(x.norm())}
    names, columns = ["the true value", *others], [pair.true, *others.values()]
    if not others:
        return None
    x = torch.stack([column.flatten() for column in columns], 1)
    sizes = x.norm(dim=0).clamp_min(1e-300)
    weights = torch.linalg.lstsq(x / sizes, pair.own.flatten()[:, None], driver="gelsd").solution[:, 0]
    keep = weights.abs() > 1e-3 * weights.abs().max()
    again = torch.linalg.lstsq(x[:, keep], pair.own.flatten()[:, None], driver="gelsd").solution[:, 0]
    terms = [f"{float(b):.4g} {name}" for b, name in zip(again, _kept(names, keep), strict=True)]
    guess = (x[:, keep] @ again).view_as(pair.own)
    return Form(kind="source", value=" + ".join(terms), usual="as computed", left=pair.left(guess))


def _kept(names: list[str], keep: Tensor) -> list[str]:
    return [name for name, kept in zip(names, keep.tolist(), strict=True) if kept]


def _gained(pair: Pair) -> Form | None:
    if len(pair.own) < 4:
        return None
    gain = (pair.own * pair.true).sum(0) / pair.true.square().sum(0).clamp_min(1e-300)
    said = f"{float(gain.min()):.4g} to {float(gain.max()):.4g} per channel"
    return Form(kind="gain", value=said, usual=1.0, left=pair.left(pair.true * gain))


def _biased(pair: Pair) -> Form | None:
    if len(pair.own) < 4:
        return None
    bias = (pair.own - pair.true).mean(0)
    said = f"rms {float(bias.square().mean().sqrt()):.4g} per channel"
    return Form(kind="bias", value=said, usual=0.0, left=pair.left(pair.true + bias))


def _normed(pair: Pair) -> Form | None:
    size = pair.true.square().sum(1, keepdim=True).clamp_min(1e-300)
    scale = (pair.own * pair.true).sum(1, keepdim=True) / size
    rms = (scale.squeeze(1) * (size.squeeze(1) / pair.true.shape[1]).sqrt()).abs()
    even = float(rms.std()) < 1e-3 * float(rms.mean()) if len(rms) > 1 else False
    words = f"normalised to rms {float(rms.mean()):.4g}" if even else (
        f"scaled by {float(scale.min()):.4g} to {float(scale.max()):.4g} per token"
    )  # fmt: skip
    return Form(kind="norm", value=words, usual="as computed", left=pair.left(scale * pair.true))


MAKERS: tuple[Callable[[Pair], Form | None], ...] = (
    _copied, _rounded, _scaled, _shifted, _clamped, _capped, _biased, _one_added, _gained, _normed, _summed,
)  # fmt: skip
