"""The result of a lint, as its JSON holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One constant of one model at which the engine's config and the spec differ, with both values. `field` is its
    name in the config."""

    model: str
    architecture: str
    knob: str
    field: str
    engine: Any
    spec: Any


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """The result for one release of an engine.

    `compared` are the names of models that were compared with a spec, with `constants` values in all; `without` has the
    names that were not, each with the reason. `note` says how far the engine computes with this config.
    """

    schema_version: int = LINT_SCHEMA_VERSION
    backend: str
    version: str
    compared: tuple[str, ...]
    constants: int
    departures: tuple[Departure, ...]
    without: dict[str, str]
    note: str = ""
    seconds: float = 0.0
    exit_code: int = 3
