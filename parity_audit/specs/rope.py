"""Rotary frequency tables from their parameters, in float64.

Sources: RoFormer (arXiv 2104.09864) for the base table; the Llama 3.1 release for `llama3`, which leaves
wavelengths below `original / high_freq_factor` alone, divides those above `original / low_freq_factor` by
`factor`, and blends in between.
"""

from __future__ import annotations

import math
from typing import Any


def default_table(theta: float, d_rot: int) -> list[float]:
    """theta^(-2j/d_rot) for j < d_rot/2, in radians per position."""
    return [theta ** (-2.0 * j / d_rot) for j in range(d_rot // 2)]


def rope_table(theta: float, scaling: dict[str, Any] | None, d_rot: int) -> list[float]:
    """inv_freq per pair, radians per position.

    Raises:
        ValueError: a scaling type this function does not know.
    """
    table = default_table(theta, d_rot)
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return table
    if kind == "linear":
        return [frequency / scaling["factor"] for frequency in table]
    if kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in table]
    raise ValueError(f"unknown rope scaling `{kind}`")


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2.0 * math.pi)
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    factor = float(scaling["factor"])
    return (1.0 - smooth) * frequency / factor + smooth * frequency
