"""Settings of either side that may explain a mismatch ("switches"), and the values under which the tokens are scored again.

A switch changes steps of the trainer's side, load settings of the engine, or both. On the trainer's side every other value
of a step is tried, because rounding like the engine is a remedy as well as rounding less. An engine is started again for
each of its switches, so only values that its user would choose are tried: the simpler path, or the finer dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parity_audit.core.errors import UsageError
from parity_audit.core.rollouts import Variation

TRAINER, ENGINE, BOTH = "trainer", "engine", "both"
FINE, COARSE = "float32", "bfloat16"
NARROW_CACHE = "float8_e4m3fn"
DTYPES = (FINE, COARSE, "float16", NARROW_CACHE, "float8_e5m2")
STEPS = {
    "head_dtype": "head in {}", "rope_dtype": "rotary tables in {}", "router_dtype": "router in {}",
    "kv_dtype": "keys and values in {}", "attention": "{} attention",
}  # fmt: skip
"""The steps of the trainer's side that can be changed: fields of `Variation`, and their names in a report."""
WRITTEN = {"attention": "attn_implementation"}
"""Steps that have another name in a BACKEND string."""
PREFIX_CACHE, EAGER = "enable_prefix_caching", "enforce_eager"
MODES = ("eager", "compiled")
COMPILING = ("vllm",)
"""Engines that can run eagerly or compiled. SGLang is not among them: its graphs cannot be used with torch-native attention."""
TOGGLES = {EAGER: ("eager engine", "compiled engine"), PREFIX_CACHE: ("prefix cache", "no prefix cache")}
"""Engine settings that are on or off, and the engine's name in a report when the setting is on and when it is off."""
ONE_BY_ONE = "one sequence at a time"


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One setting at another value: fields of `Variation` on the trainer's side, load settings on the engine's."""

    name: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def leg(self) -> str:
        """Return which side the switch changes: trainer, engine or both."""
        return BOTH if self.trainer and self.engine else TRAINER if self.trainer else ENGINE

    @property
    def steps(self) -> frozenset[tuple[str, str]]:
        """Return the (side, setting) pairs that the switch sets; two switches with a pair in common exclude each other."""
        return frozenset({(TRAINER, key) for key in self.trainer} | {(ENGINE, key) for key in self.engine})

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings to add to the BACKEND string of each side, to use the switch's values."""
        sides = ((TRAINER, self.trainer), (ENGINE, self.engine))
        return {f"--{side} ..., {WRITTEN.get(key, key)}": value for side, own in sides for key, value in own.items()}


def steps_of(variation: Variation) -> dict[str, str]:
    """Return the steps that a variation changes, as settings of the trainer's side."""
    return {key: value for key in STEPS if (value := getattr(variation, key))}


def own_steps(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Variation]:
    """Separate a trainer's settings: return those that remain, and the steps (`head_dtype=float32`, `rows=1`) as a variation.

    Raises:
        UsageError: a step's dtype is not in `DTYPES`, or `rows` is not an integer from 0 on (0: no bound).
    """
    dtypes: dict[str, Any] = {key: str(value) for key, value in settings.items() if key in STEPS and key != "attention"}
    for key, value in dtypes.items():
        if value not in DTYPES:
            raise UsageError(
                f"the trainer's {key} cannot be {value}", code="trainer-dtype", found=value, expected=", ".join(DTYPES)
            )
    rows = settings.get("rows", 0)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise UsageError(
            f"the trainer cannot run {rows} sequences at a time", code="trainer-rows", expected="1 or more"
        )
    rest = {key: value for key, value in settings.items() if key not in (*dtypes, "rows")}
    return rest, replace(Variation(), **dtypes, rows=rows)


def trainer_switches(dtype: str, attention: str, base: Variation, *, experts: bool) -> list[Switch]:
    """Return a switch for every other value of every step of the trainer's side; `base` is how it runs without a switch."""
    present = {
        "head_dtype": dtype,
        "rope_dtype": dtype,
        "router_dtype": dtype,
        "kv_dtype": dtype,
        "attention": attention,
    }
    present |= steps_of(base)
    others = {
        "head_dtype": (FINE, COARSE), "rope_dtype": (FINE, COARSE), "router_dtype": (FINE, COARSE) if experts else (),
        "kv_dtype": (COARSE, NARROW_CACHE), "attention": ("eager", "sdpa"),
    }  # fmt: skip
    found = [
        Switch(name=STEPS[key].format(value), trainer={key: value})
        for key, values in others.items()
        for value in values
        if value != present[key]
    ]
    return [*found, Switch(name=ONE_BY_ONE, trainer={"rows": 1})]


def engine_modes(engine: str, mode: str | None, prefix_cache: bool | None) -> dict[str, bool]:
    """Return the load settings that belong to the user's choice of engine mode and prefix cache (None: not chosen).

    Raises:
        UsageError: no engine has this mode, or this engine does not.
    """
    if mode not in (None, *MODES):
        raise UsageError(
            f"`{mode}` is no engine mode", code="engine-mode", found=str(mode), expected=" or ".join(MODES)
        )
    if mode is not None and engine not in COMPILING:
        raise UsageError(
            f"{engine} has one mode only: nothing of it is compiled on this path", code="engine-mode", found=mode,
            expected=f"--engine-mode with {' or '.join(COMPILING)}", hint="drop --engine-mode",
        )  # fmt: skip
    chosen = {} if mode is None else {EAGER: mode == MODES[0]}
    return chosen if prefix_cache is None else {**chosen, PREFIX_CACHE: prefix_cache}


def engine_switches(settings: Mapping[str, Any]) -> list[Switch]:
    """Return the switches of an engine that reports these settings."""
    found = []
    if settings.get("head_dtype") not in (None, FINE):
        found.append(Switch(name=STEPS["head_dtype"].format(FINE), engine={"hf_overrides": {"head_dtype": FINE}}))
    found += [
        Switch(name=on if not settings[key] else off, engine={key: not settings[key]})
        for key, (on, off) in TOGGLES.items()
        if settings.get(key) is not None
    ]
    if settings.get("cache_dtype") not in (None, "auto"):
        found.append(Switch(name="keys and values as computed", engine={"kv_cache_dtype": "auto"}))
    found += [
        Switch(name=ONE_BY_ONE, engine={key: 1}) for key in ("max_num_seqs", "max_running_requests")
        if settings.get(key) not in (None, 1)
    ]  # fmt: skip
    return found


def joined(trainer: list[Switch], engine: list[Switch]) -> list[Switch]:
    """Return the switches of both sides, and one more for each switch that both have, which changes both at once."""
    by_name = {switch.name: switch for switch in engine}
    both = [
        Switch(name=own.name, trainer=own.trainer, engine=by_name[own.name].engine)
        for own in trainer
        if own.name in by_name
    ]
    return [*trainer, *engine, *both]
