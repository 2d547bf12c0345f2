"""Rotary frequency tables from their parameters.

Sources:

- base table: RoFormer (arXiv 2104.09864);
- `llama3`: the Llama 3.1 release. It keeps the frequencies of wavelengths below `original / high_freq_factor`, divides those of
  wavelengths above `original / low_freq_factor` by `factor`, and blends in between;
- `yarn`: YaRN (arXiv 2309.00071). It does the same along the index of the pair and multiplies cos and sin by a factor;
- `longrope`: LongRoPE (arXiv 2402.13753). It has a factor per pair, with one list up to the original context and one beyond;
- `dynamic`: dynamic NTK raises theta with the length beyond the original context; Hunyuan raises it once, by `alpha`;
- `proportional`: Gemma 4 rotates only the first pairs, at the frequencies that they have if the whole head is rotated;
- `table`: frequencies that are listed one by one.

Programs compute these tables in float32, and the rounding is part of what they compute. So the dtype is a parameter, and the order
of operations is that of transformers: in float32 the result equals theirs to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from parity_audit.formulas.choices import AT_EVERY_LENGTH, FACTORS

YARN_FAST, YARN_SLOW = 32.0, 1.0
"""The number of turns over the original context above which YaRN keeps a pair's frequency, and below which it divides it by the
factor; the paper's values for Llama."""
YARN_WIDTH = 0.001
"""The width of a YaRN ramp whose two ends coincide, which makes the ramp a step without a division by 0."""


def default_table(theta: float, d_rot: int) -> list[float]:
    """Return theta^(-2j/d_rot) for j < d_rot/2, in radians per position, in float64."""
    return rope_table(theta, None, d_rot)


def kind_of(scaling: Mapping[str, Any] | None) -> str:
    """Return the type of a scaling, "default" if there is none; configs call it `rope_type`, older ones `type`."""
    given = scaling or {}
    return str(given.get("rope_type") or given.get("type") or "default")


def rope_table(
    theta: float, scaling: Mapping[str, Any] | None, d_rot: int, length: int | None = None
) -> list[float]:  # fmt: skip
    """Return `inverse_frequencies` in float64 as a list of numbers."""
    table: list[float] = inverse_frequencies(theta, scaling, d_rot, length).tolist()
    return table


def inverse_frequencies(
    theta: float,
    scaling: Mapping[str, Any] | None,
    d_rot: int,
    length: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the angle per position of each rotated pair.

    Args:
        theta: the base.
        scaling: the config's dictionary, None for the base table.
        d_rot: the number of rotated components of a head, twice the number of pairs.
        length: the length of the sequence, on which `longrope` and `dynamic` depend.
        dtype: the dtype of every step of the computation.

    Returns:
        `[d_rot / 2]` in radians per position, of type `dtype`.

    Raises:
        ValueError: the type of the scaling is unknown, or `d_rot` is odd, so that one component has no partner.
    """
    if d_rot % 2:
        raise ValueError(f"{d_rot} components of a head cannot be rotated: they turn in pairs")
    kind = kind_of(scaling)
    if scaling is None or kind == "default":
        return 1.0 / _powers(theta, d_rot, dtype)
    if kind == "linear":
        return 1.0 / _powers(theta, d_rot, dtype) / float(scaling["factor"])
    if kind == "proportional":
        turned = int(float(scaling["partial_rotary_factor"]) * d_rot // 2)
        table = 1.0 / _powers(theta, d_rot, dtype)
        return torch.where(torch.arange(len(table)) < turned, table, torch.zeros_like(table))
    if kind == "llama3":
        return _llama3(1.0 / _powers(theta, d_rot, dtype), scaling)
    if kind == "yarn":
        return _yarn(theta, scaling, _powers(theta, d_rot, dtype))
    if kind == "table":
        return torch.tensor(scaling["inv_freq"], dtype=dtype)
    if kind == "longrope":
        factors = torch.tensor(_longrope_factors(scaling, length), dtype=dtype)
        return 1.0 / (factors * _powers(theta, d_rot, dtype))
    if kind == "dynamic" and scaling.get("alpha"):
        return 1.0 / _powers(theta * float(scaling["alpha"]) ** (d_rot / (d_rot - 2)), d_rot, dtype)
    if kind == "dynamic":
        return 1.0 / _powers(dynamic_theta(theta, scaling, d_rot, length), d_rot, dtype)
    raise ValueError(f"unknown rope scaling `{kind}`")


def _powers(theta: float, d_rot: int, dtype: torch.dtype) -> Tensor:
    """Return theta^(2j/d_rot), the positions per radian of each pair."""
    powers: Tensor = theta ** _exponents(d_rot, dtype)
    return powers


@lru_cache(maxsize=64)
def _exponents(d_rot: int, dtype: torch.dtype) -> Tensor:
    """Return 2j/d_rot for each pair j; cached, because a search asks for the same few lists again and again."""
    return torch.arange(0, d_rot, 2, dtype=torch.int64).to(dtype) / d_rot


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """Return the factor by which a scaling multiplies cos and sin.

    It is the scaling's `attention_factor` if that is given, a function of the stretch for `yarn` and `longrope`, and 1 otherwise.
    """
    kind, given = kind_of(scaling), scaling or {}
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    factor = float(given.get("factor") or _stretch(given))
    if kind not in ("yarn", "longrope") or factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1.0 + math.log(factor) / math.log(float(given["original_max_position_embeddings"])))
    mscale, everywhere = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and everywhere:
        return (0.1 * float(mscale) * math.log(factor) + 1.0) / (0.1 * float(everywhere) * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _stretch(scaling: Mapping[str, Any]) -> float:
    """Return the stretch factor that a config gives as the quotient of two lengths, or 1 if it does not give both."""
    longest, original = (scaling.get(f"{name}max_position_embeddings") for name in ("", "original_"))
    return float(longest) / float(original) if longest and original else 1.0


def _llama3(table: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original, factor = float(scaling["original_max_position_embeddings"]), float(scaling["factor"])
    wavelength = 2 * math.pi / table
    divided = torch.where(wavelength > original / low, table / factor, table)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * divided / factor + smooth * divided
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, divided)


def _yarn(theta: float, scaling: Mapping[str, Any], powers: Tensor) -> Tensor:
    """Return YaRN's frequencies: pairs with more than beta_fast turns over the original context keep theirs, pairs with less than
    beta_slow turns have theirs divided by the factor, and a linear ramp over the pairs' indices blends in between."""
    d_rot, original = 2 * len(powers), float(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or _stretch(scaling))

    def index(turns: float) -> float:
        return d_rot * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = (
        index(float(scaling.get(name) or usual)) for name, usual in (("beta_fast", YARN_FAST), ("beta_slow", YARN_SLOW))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_rot - 1)
    high = high if high != low else high + YARN_WIDTH
    ramp = ((torch.arange(len(powers), dtype=powers.dtype) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _longrope_factors(scaling: Mapping[str, Any], length: int | None) -> list[float]:
    beyond = length is not None and length > float(scaling["original_max_position_embeddings"])
    if FACTORS in scaling:
        beyond = AT_EVERY_LENGTH.index(scaling[FACTORS]) == 1
    return [float(factor) for factor in scaling["long_factor" if beyond else "short_factor"]]


def dynamic_theta(theta: float, scaling: Mapping[str, Any], d_rot: int, length: int | None) -> float:
    """Return the base for a sequence of this length: theta ((factor length / original) - (factor - 1))^(d_rot / (d_rot - 2)).

    This applies beyond the original context; up to it the base is theta. A scaling with `theta_there` gives the base for lengths
    over `beyond` directly.
    """
    if "theta_there" in scaling:
        return float(scaling["theta_there"]) if (length or 0) > scaling["beyond"] else theta
    names = ("original_max_position_embeddings", "max_position_embeddings")
    original = float(next((scaling[name] for name in names if scaling.get(name)), 0.0))
    stretch = (length or 0) / original if original else 1.0
    factor = float(scaling["factor"])
    return theta * float((factor * max(stretch, 1.0) - (factor - 1.0)) ** (d_rot / (d_rot - 2)))
