"""Rotary frequency tables from their parameters, in float64.

Sources: RoFormer (arXiv 2104.09864) for the base table; the Llama 3.1 release for `llama3`, which leaves
wavelengths below `original / high_freq_factor` alone, divides those above `original / low_freq_factor` by
`factor`, and blends in between; YaRN (arXiv 2309.00071), which does the same along the index of the pair and
stretches cos and sin; LongRoPE (arXiv 2402.13753), which has a factor per pair, one list up to the original
context and one beyond; dynamic NTK, which raises theta with the length beyond the original context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def default_table(theta: float, d_rot: int) -> list[float]:
    """theta^(-2j/d_rot) for j < d_rot/2, in radians per position."""
    return [theta ** (-2.0 * j / d_rot) for j in range(d_rot // 2)]


def kind_of(scaling: Mapping[str, Any] | None) -> str:
    """The scaling's type; configs call it `rope_type` or, older, `type`."""
    given = scaling or {}
    return str(given.get("rope_type") or given.get("type") or "default")


def rope_table(
    theta: float, scaling: Mapping[str, Any] | None, d_rot: int, length: int | None = None
) -> list[float]:  # fmt: skip
    """inv_freq per pair, radians per position; `length` is the sequence's, where the scaling depends on it.

    Raises:
        ValueError: a scaling type this function does not know.
    """
    kind, table = kind_of(scaling), default_table(theta, d_rot)
    if scaling is None or kind == "default":
        return table
    if kind == "linear":
        return [frequency / scaling["factor"] for frequency in table]
    if kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in table]
    if kind == "yarn":
        return _yarn(theta, scaling, table)
    if kind == "longrope":
        return [f / factor for f, factor in zip(table, _longrope_factors(scaling, length), strict=True)]
    if kind == "dynamic":
        return default_table(dynamic_theta(theta, scaling, d_rot, length), d_rot)
    raise ValueError(f"unknown rope scaling `{kind}`")


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


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2.0 * math.pi)
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    factor = float(scaling["factor"])
    return (1.0 - smooth) * frequency / factor + smooth * frequency


def _yarn(theta: float, scaling: Mapping[str, Any], table: list[float]) -> list[float]:
    """Pairs that turn more than beta_fast times over the original context stay, those below beta_slow are divided."""
    d_rot, original = 2 * len(table), float(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or _stretch(scaling))

    def index(turns: float) -> float:
        return d_rot * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = index(float(scaling.get("beta_fast") or 32.0)), index(float(scaling.get("beta_slow") or 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_rot - 1)
    width = (high - low) or 0.001
    ramps = [min(1.0, max(0.0, (j - low) / width)) for j in range(len(table))]
    return [f * (1.0 - ramp) + f / factor * ramp for f, ramp in zip(table, ramps, strict=True)]


def _longrope_factors(scaling: Mapping[str, Any], length: int | None) -> list[float]:
    beyond = length is not None and length > float(scaling["original_max_position_embeddings"])
    return [float(factor) for factor in scaling["long_factor" if beyond else "short_factor"]]


def dynamic_theta(theta: float, scaling: Mapping[str, Any], d_rot: int, length: int | None) -> float:
    """theta ((factor length / original) - (factor - 1))^(d_rot / (d_rot - 2)) beyond the original context."""
    names = ("original_max_position_embeddings", "max_position_embeddings")
    original = float(next((scaling[name] for name in names if scaling.get(name)), 0.0))
    stretch = (length or 0) / original if original else 1.0
    factor = float(scaling["factor"])
    return theta * float((factor * max(stretch, 1.0) - (factor - 1.0)) ** (d_rot / (d_rot - 2)))
