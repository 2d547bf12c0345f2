"""What a lint found, as its JSON carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LINT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One constant of one name: what the engine's config says, and what the spec says. `field`: of the engine's config."""

    model: str
    architecture: str
    knob: str
    field: str
    engine: Any
    spec: Any


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """One release. `compared` names were held against a spec, `constants` values in all; `without` names and why not.

    `note` says how far the engine computes with this config.
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
