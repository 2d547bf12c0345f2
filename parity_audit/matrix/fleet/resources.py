"""The resources that the task of a cell asks for: rules in the matrix file; every rule whose patterns match a cell applies to it.

resources:
  - {cpus: 1}                                   # every cell
  - {candidate: "vllm*", gpus: 1, memory: 40}   # shell patterns; memory in GB
  - {model: "*70B*", gpus: 4, env: {NCCL_DEBUG: WARN}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase

from parity_audit.core.card import Asked
from parity_audit.core.choices import nearest
from parity_audit.core.errors import UsageError

GB = 10**9
DEVICE_GPUS = {"cpu": 0.0, "cuda": 1.0}
"""GPUs of a cell, by its device, if no rule states a number."""
CPUS = 1.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of `resources`; `model` and `candidate` are shell patterns, `memory` is in GB.

    An amount that is None is left to other rules.
    """

    model: str = "*"
    candidate: str = "*"
    cpus: float | None = None
    gpus: float | None = None
    memory: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def fits(self, asked: Asked) -> bool:
        """Whether both patterns match this cell."""
        return fnmatchcase(asked.model, self.model) and fnmatchcase(asked.candidate, self.candidate)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that one task asks for; `memory` is in bytes (0: no requirement), `env` the variables of its process."""

    cpus: float = CPUS
    gpus: float = 0.0
    memory: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def resources_of(asked: Asked, rules: Sequence[Rule]) -> Resources:
    """Return the resources of a cell.

    Each amount comes from the last matching rule that states it. The variables of all matching rules are merged; a later rule
    replaces the value of an earlier one.
    """
    own = [rule for rule in rules if rule.fits(asked)]

    def last(values: Sequence[float | None], otherwise: float) -> float:
        return next((value for value in reversed(values) if value is not None), otherwise)

    return Resources(
        cpus=last([rule.cpus for rule in own], CPUS),
        gpus=last([rule.gpus for rule in own], DEVICE_GPUS[asked.device]),
        memory=int(last([rule.memory for rule in own], 0.0) * GB),
        env={key: value for rule in own for key, value in rule.env.items()},
    )  # fmt: skip


def read_rules(value: object, where: str) -> tuple[Rule, ...]:
    """Return the rules in the `resources` of a matrix file.

    Raises:
        UsageError: `resources` is not a list of rules, or a rule has an unknown key, a malformed `env`, or an amount that is not
            a number of at least 0.
    """
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise _refused("`resources` is no list of rules", where, "[{cpus: 1}]")
    return tuple(_rule(item, where) for item in value)


def _rule(item: Mapping[object, object], where: str) -> Rule:
    known = [one.name for one in fields(Rule)]
    given: dict[str, object] = {str(key): found for key, found in item.items()}
    for key in given:
        if key not in known:
            raise _refused(f"`{key}` is no key of a rule", where, ", ".join(known), nearest(key, known))
    env = given.get("env", {})
    if not isinstance(env, Mapping):
        raise _refused("`env` is no mapping of names to values", where, "{NCCL_DEBUG: WARN}")
    return Rule(
        model=str(given.get("model", "*")), candidate=str(given.get("candidate", "*")),
        cpus=_number("cpus", given, where), gpus=_number("gpus", given, where), memory=_number("memory", given, where),
        env={str(key): str(found) for key, found in env.items()},
    )  # fmt: skip


def _number(key: str, given: Mapping[str, object], where: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise _refused(f"`{key}: {value}` is no amount", where, "a number from 0 on")
    return float(value)


def _refused(message: str, where: str, expected: str, hint: str = "") -> UsageError:
    return UsageError(message, code="bad-matrix", where=where, expected=expected, hint=hint)
