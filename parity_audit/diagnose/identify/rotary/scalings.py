"""Scalings that may lie behind a table of frequencies, from the simplest to the freest.

The spec's own, none, linear, llama3 and yarn with known thresholds, then with free ones. Of llama3's and yarn's
thresholds only original/low and original/high can be seen, so the original context is the spec's, or 8192 and 4096.
Yarn rounds its thresholds to whole pairs unless told not to, so several betas make one table: the usual ones are
tried first. Longrope has a factor per pair and could explain any table; it is recognised by the spec's own lists.
Dynamic NTK is another theta, and another one for each length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.formulas.frequencies import kind_of, rope_table

FACTORS = "factors"
"""Says in a finding which of longrope's two lists a port takes, where it never looks at the length."""
LLAMA3_THRESHOLDS = (1.0, 4.0, 8192.0)
YARN_ORIGINAL = 4096.0
LEAST_THRESHOLD = 0.01
YARN_BETAS = ((32.0, 1.0), (16.0, 1.0), (8.0, 1.0), (64.0, 1.0), (32.0, 2.0), (16.0, 2.0))
Scaling = Callable[[list[float]], "dict[str, Any] | None"]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A formula with log theta (and log factor, low, high) free: start values, and the scaling they mean.

    `shown` is what the finding says, where that is not the formula itself; `theta` the only one that it holds for.
    """

    name: str
    start: Tensor
    scaling: Scaling
    names: tuple[str, ...]
    length: int | None = None
    shown: Scaling | None = None
    theta: float | None = None

    def plausible(self, values: Sequence[float]) -> bool:
        """Whether free parameters stayed where a model may have them: four of them bend to many a table."""
        named = dict(zip(self.names, values, strict=True))
        low, high = (named.get(f"{which}_freq_factor") for which in ("low", "high"))
        if low is not None and high is not None and not LEAST_THRESHOLD < low < high < 1 / LEAST_THRESHOLD:
            return False
        return self.name in ("spec", "default", "linear") or named.get("factor", 2.0) > 1.0

    def table(self, p: Tensor, pairs: int) -> Tensor:
        """Log frequencies."""
        values = p.exp().tolist()
        return log_table(values[0], self.scaling(values[1:]), pairs, self.length)


def log_table(theta: float, scaling: dict[str, Any] | None, pairs: int, length: int | None = None) -> Tensor:
    """Log frequencies of these values.

    Raises:
        ValueError: a scaling type that `formulas.frequencies` does not know.
    """
    return torch.tensor(rope_table(theta, scaling, 2 * pairs, length), dtype=torch.float64).log()


def known(scaling: Any, theta: float, pairs: int, length: int | None) -> bool:
    """Whether the spec's scaling makes a table of this size."""
    try:
        log_table(theta, scaling, pairs, length)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return False
    return True


def hypotheses(
    measured: Tensor, sigma: Tensor, spec_theta: float | None, spec_scaling: Any, lengths: Sequence[int]
) -> list[Hypothesis]:
    """From the simplest to the freest; `lengths` are those of the sequences that share the table."""
    pairs = measured.numel()
    theta = _start_theta(measured, sigma, pairs)
    plain = -theta * torch.arange(pairs, dtype=torch.float64) / pairs
    tail = float((plain - measured)[torch.isfinite(sigma)][-1].clamp(min=0.1))
    first = float(measured[0].neg().clamp(min=0.0))
    out = _of_the_spec(spec_theta, spec_scaling, pairs, lengths)
    out.append(_hypothesis("default", [theta], lambda _: None))
    out.append(_hypothesis("linear", [theta, first], lambda v: {"rope_type": "linear", "factor": v[0]}, "factor"))
    llama3s, yarns = _llama3s(plain, measured, sigma, theta, tail, spec_scaling), _yarns(theta, tail, spec_scaling)
    return [*out, *yarns, *llama3s] if kind_of(spec_scaling) == "yarn" else [*out, *llama3s, *yarns]


def _hypothesis(
    name: str, start: list[float], scaling: Scaling, *names: str, length: int | None = None,
    shown: Scaling | None = None, theta: float | None = None,
) -> Hypothesis:  # fmt: skip
    return Hypothesis(name=name, start=torch.tensor(start, dtype=torch.float64), scaling=scaling,
                      names=("theta", *names), length=length, shown=shown, theta=theta)  # fmt: skip


def _of_the_spec(theta: float | None, scaling: Any, pairs: int, lengths: Sequence[int]) -> list[Hypothesis]:
    """The spec's scaling at these lengths, and what a port makes of it that never looks at the length."""
    lengths = lengths or (1,)
    if not theta or not all(known(scaling, theta, pairs, length) for length in lengths):
        return []
    tables = [rope_table(theta, scaling, 2 * pairs, length) for length in lengths]
    # Beyond the original context dynamic NTK is another theta, so only the spec's own theta tells it.
    fixed = theta if kind_of(scaling) == "dynamic" else None
    out = []
    if all(table == tables[0] for table in tables):
        out.append(_hypothesis("spec", [math.log(theta)], lambda _: scaling, length=lengths[0], theta=fixed))
    if kind_of(scaling) != "longrope":
        return out
    original = int(scaling["original_max_position_embeddings"])
    for which, other in (("short", 1), ("long", original + 1)):
        said = {"rope_type": "longrope", FACTORS: f"{which} at every length"}
        out.append(_hypothesis(f"longrope, {which} factors", [math.log(theta)], lambda _: scaling, length=other,
                               shown=lambda _, said=said: said))  # type: ignore[misc]  # fmt: skip
    return out


def as_setting(value: KnobValue, spec: KnobValue) -> KnobValue:
    """A scaling as a model takes it: longrope with one kind of factors at every length has these twice in its table."""
    if not isinstance(value, dict) or not isinstance(spec, dict) or FACTORS not in value:
        return value
    same = spec[f"{str(value[FACTORS]).partition(' ')[0]}_factor"]
    return {**spec, "short_factor": same, "long_factor": same}


def thresholds_of(scaling: Any) -> tuple[float, float, float]:
    """low_freq_factor, high_freq_factor and original context of a spec's scaling, or Llama 3.1's."""
    given = scaling if isinstance(scaling, dict) else {}
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (float(given.get(name, usual)) for name, usual in zip(names, LLAMA3_THRESHOLDS, strict=True))
    return low, high, original


def _llama3s(
    plain: Tensor, measured: Tensor, sigma: Tensor, theta: float, tail: float, spec_scaling: Any
) -> list[Hypothesis]:
    low, high, original = thresholds_of(spec_scaling)

    def llama3(values: list[float]) -> dict[str, Any]:
        factor, lower, upper = (*values, low, high)[:3] if len(values) == 1 else values
        return {"rope_type": "llama3", "factor": factor, "low_freq_factor": lower, "high_freq_factor": upper,
                "original_max_position_embeddings": original}  # fmt: skip

    free = [theta, tail, *_start_thresholds(plain, measured, sigma, tail, original)]
    return [
        _hypothesis("llama3", [theta, tail], llama3, "factor"),
        _hypothesis("llama3 with other thresholds", free, llama3, "factor", "low_freq_factor", "high_freq_factor"),
    ]


def _yarns(theta: float, tail: float, spec_scaling: Any) -> list[Hypothesis]:
    """Usual betas first, thresholds rounded and not."""
    given = spec_scaling if isinstance(spec_scaling, dict) else {}
    original = float(given.get("original_max_position_embeddings") or YARN_ORIGINAL)
    own = (float(given.get("beta_fast") or 32.0), float(given.get("beta_slow") or 1.0))
    out = []
    for betas in dict.fromkeys((own, *YARN_BETAS)):
        for truncate in dict.fromkeys((bool(given.get("truncate", True)), True, False)):
            fixed = {"rope_type": "yarn", "beta_fast": betas[0], "beta_slow": betas[1], "truncate": truncate,
                     "original_max_position_embeddings": original}  # fmt: skip
            out.append(_hypothesis("yarn", [theta, tail], lambda v, fixed=fixed: {**fixed, "factor": v[0]}, "factor"))  # type: ignore[misc]
    return out


def _start_thresholds(
    plain: Tensor, measured: Tensor, sigma: Tensor, tail: float, original: float
) -> tuple[float, float]:
    """log low and log high from the pairs at the ends of the transition, or either side of it where it is sharp.

    smooth = (turns - low) / (high - low) is a line in turns = original / wavelength; the two pairs nearest its
    middle give it, clipped so that pairs beyond are flat.
    """
    sure = torch.isfinite(sigma)
    turns = original * plain[sure].exp() / (2 * math.pi)
    smooth = (((measured - plain)[sure]).exp() - math.exp(-tail)) / (1 - math.exp(-tail))
    above, below = turns[smooth > 0.99], turns[smooth < 0.01]
    inside = (smooth >= 0.01) & (smooth <= 0.99)
    low = float(below.max()) if below.numel() else float(turns.min())
    high = float(above.min()) if above.numel() else float(turns.max())
    if int(inside.sum()) >= 2:
        t, s = turns[inside], smooth[inside]
        slope = float((t[0] - t[-1]) / (s[0] - s[-1]))
        low, high = float(t[-1] - s[-1] * slope), float(t[-1] + (1 - s[-1]) * slope)
    elif bool(inside.any()):
        t1, s1 = float(turns[inside]), float(smooth[inside])
        low = (t1 - s1 * high) / (1 - s1) if t1 > s1 * high else low
    return math.log(max(low, 1e-6)), math.log(max(high, 1e-5))


def _start_theta(measured: Tensor, sigma: Tensor, pairs: int) -> float:
    """log theta from the fastest pairs, which no scaling but `linear` touches; slopes only, for its sake."""
    index = torch.arange(pairs, dtype=torch.float64) / pairs
    few = torch.isfinite(sigma).nonzero()[:, 0][: max(2, pairs // 8)]
    x, y = index[few] - index[few[0]], measured[few] - measured[few[0]]
    return float(-(x * y).sum() / (x * x).sum().clamp_min(1e-300))
