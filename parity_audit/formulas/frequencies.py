"""Rotary frequency tables from their parameters.

Sources: RoFormer (arXiv 2104.09864) for the base table; the Llama 3.1 release for `llama3`, which leaves
wavelengths below `original / high_freq_factor` alone, divides those above `original / low_freq_factor` by
`factor`, and blends in between; YaRN (arXiv 2309.00071), which does the same along the index of the pair and
stretches cos and sin; LongRoPE (arXiv 2402.13753), which has a factor per pair, one list up to the original
context and one beyond; dynamic NTK, which raises theta with the length beyond the original context, or, in
Hunyuan, once by `alpha`; `proportional` (Gemma 4), which rotates the first pairs alone, at the frequencies of a whole head; `table`,
frequencies that no formula makes.

A table is a definition, and programs compute it in float32. So the dtype is a parameter, and the order of operations is
that of transformers: in float32 the result is then the same to the last bit.
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
"""Turns over the original context above which a pair stays, and below which it is divided; the paper's values for Llama."""
YARN_WIDTH = 0.001
"""The width of a YaRN ramp whose ends fall together, so that it stays a step."""


def default_table(theta: float, d_rot: int) -> list[float]:
    """theta^(-2j/d_rot) for j < d_rot/2, in radians per position, in float64."""
    return rope_table(theta, None, d_rot)


def kind_of(scaling: Mapping[str, Any] | None) -> str:
    """The scaling's type; configs call it `rope_type` or, older, `type`."""
    given = scaling or {}
    return str(given.get("rope_type") or given.get("type") or "default")


def rope_table(
    theta: float, scaling: Mapping[str, Any] | None, d_rot: int, length: int | None = None
) -> list[float]:  # fmt: skip
    """`inverse_frequencies` in float64, as numbers."""
    table: list[float] = inverse_frequencies(theta, scaling, d_rot, length).tolist()
    return table


def inverse_frequencies(
    theta: float,
    scaling: Mapping[str, Any] | None,
    d_rot: int,
    length: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The angle per position of each rotated pair.

    Args:
        theta: the base.
        scaling: the config's dictionary, None for the base table.
        d_rot: rotated components of a head, twice the number of pairs.
        length: of the sequence, where the scaling depends on it (`longrope`, `dynamic`).
        dtype: of every step of the computation.

    Returns:
        `[d_rot / 2]` in radians per position, of type `dtype`.

    Raises:
        ValueError: a scaling type this function does not know, or a component without another to turn with.
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
    """theta^(2j/d_rot): positions per radian of each pair."""
    powers: Tensor = theta ** _exponents(d_rot, dtype)
    return powers


@lru_cache(maxsize=64)
def _exponents(d_rot: int, dtype: torch.dtype) -> Tensor:
    """2j/d_rot of each pair: a search asks for the same few again and again."""
    return torch.arange(0, d_rot, 2, dtype=torch.int64).to(dtype) / d_rot


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What a scaling multiplies cos and sin by: 1 but for yarn and longrope."""
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
    """The factor that a config gives as two lengths."""
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
    """Pairs that turn more than beta_fast times over the original context stay, those below beta_slow are divided."""
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
    """theta ((factor length / original) - (factor - 1))^(d_rot / (d_rot - 2)) beyond the original context, or the base that is said
    to be there."""
    if "theta_there" in scaling:
        return float(scaling["theta_there"]) if (length or 0) > scaling["beyond"] else theta
    names = ("original_max_position_embeddings", "max_position_embeddings")
    original = float(next((scaling[name] for name in names if scaling.get(name)), 0.0))
    stretch = (length or 0) / original if original else 1.0
    factor = float(scaling["factor"])
    return theta * float((factor * max(stretch, 1.0) - (factor - 1.0)) ** (d_rot / (d_rot - 2)))
