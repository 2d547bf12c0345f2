"""Replace numbers that are not finite: a report holds finite numbers only, and one infinite number must not make it invalid."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from parity_audit.compare.floor import LARGEST
from parity_audit.core.report import Candidate


def with_finite_numbers(candidate: Candidate) -> Candidate:
    """Return the candidate with infinite numbers replaced by +-`LARGEST` and NaN by None, and a warning with their count."""
    counted: list[float] = []
    replaced: Candidate = _finite(candidate, counted)
    if not counted:
        return candidate
    warning = f"{len(counted)} numbers of this result are not finite; NaN is shown as null, infinity as {LARGEST:g}"
    return dataclasses.replace(replaced, warnings=(*replaced.warnings, warning))


def _finite(value: Any, counted: list[float]) -> Any:
    """Return the value with every number inside it made finite, and append each replaced number to `counted`."""
    if isinstance(value, float) and not math.isfinite(value):
        counted.append(value)
        return None if math.isnan(value) else math.copysign(LARGEST, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {item.name: _finite(getattr(value, item.name), counted) for item in dataclasses.fields(value)}
        return dataclasses.replace(value, **found)
    if isinstance(value, dict):
        return {key: _finite(item, counted) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_finite(item, counted) for item in value)
    return value
