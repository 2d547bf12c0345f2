"""The result of `parity-audit invariance`, as invariance.json holds it. Logits and log-probabilities are in nats."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.types import NotTested

INVARIANCE_SCHEMA_VERSION = 1


class Invariance(str, enum.Enum):
    """How a result depends on the conditions of its run.

    `bitwise`: not at all. `class-only`: its bits depend on the shape of the run alone (how many rows each kernel gets);
    a run of the same shape with other neighbours, or at another place, has the same bits. `numeric`: the bits depend on
    more than the shape, but within the noise floor. `broken`: the result changes by more than rounding explains.
    `error`: it could not be run.
    """

    BITWISE = "bitwise"
    CLASS_ONLY = "class-only"
    NUMERIC = "numeric"
    BROKEN = "broken"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SiteChange:
    """The change of one site from its value in the base condition.

    `ulp` is the largest difference in units of the last place of the largest number of that token's vector. `ratio` is
    the largest RMSE of a token over the noise floor at that site and position, None if no floor is known; `position` is
    that token.
    """

    site: str
    max_abs: float
    ulp: float
    ratio: float | None
    position: int


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """The result of one way to run the subject, compared with the condition `base`.

    `bits` is a hash of every site at the compared positions. `nats` is the largest difference of a log-probability over
    the vocabulary, `logits_max_abs` that of a logit. `repeatable`: whether a second run gave the same bits, None if it
    was not needed. `facts` has what the program itself counted. A condition that was not run has the reason in `gap`
    and no verdict.
    """

    axis: str
    name: str
    base: str
    verdict: Invariance | None
    why: str = ""
    bits: str = ""
    sites: int = 0
    changed: tuple[SiteChange, ...] = ()
    first_site: str | None = None
    logits_max_abs: float = 0.0
    nats: float = 0.0
    repeatable: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    gap: str = ""


@dataclass(frozen=True, kw_only=True)
class AxisResult:
    """The result of one question: its conditions grouped into classes of equal bits, and the worst of their verdicts.

    `classes` has the names of conditions with equal bits; the first class is the one that equals the base. `words`
    prints them, sizes as "{1} {2,3} {>=4}".
    """

    name: str
    question: str
    verdict: Invariance | None
    classes: tuple[tuple[str, ...], ...]
    words: str
    conditions: tuple[ConditionResult, ...]


@dataclass(frozen=True, kw_only=True)
class OperationClasses:
    """One operation run with different numbers of rows: the sizes with equal bits, and the sizes at which its kernel
    changes.

    `ulp` is the largest difference from the result at the first size, in units of the last place of the row's largest
    number. `like_it` counts further operations with the same class and shapes, which were not run.
    """

    name: str
    kind: str
    shape: str
    varied: str
    words: str
    switches: tuple[int, ...]
    ulp: float
    like_it: int = 0


@dataclass(frozen=True, kw_only=True)
class Divergent:
    """A greedy completion that differs from that of the prompt run alone: the first differing token, and whether
    rounding explains it.

    `margin` is the difference of the two largest logits there; `moved` is the largest change of a logit that was
    measured. For another token to win, two logits have to change against each other by the margin, so it is a `tie` if
    the margin is at most twice the largest change.
    """

    batch: int
    row: int
    position: int
    token_id: int
    alone_token_id: int
    margin: float
    moved: float
    tie: bool


@dataclass(frozen=True, kw_only=True)
class Completions:
    """The greedy completions of one prompt in different batches."""

    runs: int
    tokens: int
    unique: int
    batches: tuple[int, ...]
    divergent: tuple[Divergent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Control:
    """The negative control: whether anything differed at all, so that equal bits mean something. `where` says what
    differed."""

    fired: bool
    where: str


@dataclass(frozen=True, kw_only=True)
class CandidateInvariance:
    """The result of one backend; `code` is that of the error that ended it."""

    backend: str
    package: str
    version: str
    settings: dict[str, Any]
    verdict: Invariance
    why: str
    axes: tuple[AxisResult, ...] = ()
    run_to_run: tuple[AxisResult, ...] = ()
    operations: tuple[OperationClasses, ...] = ()
    first_operation: str | None = None
    first_site: str | None = None
    control: Control = Control(fired=False, where="")
    completions: Completions | None = None
    not_tested: tuple[NotTested, ...] = ()
    error: str = ""
    code: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InvarianceReport:
    """The whole result; `reference` is the backend whose float64 run measures the noise floor."""

    schema_version: int = INVARIANCE_SCHEMA_VERSION
    model: str
    weights: dict[str, Any]
    dtype: str
    device: str
    subject: dict[str, Any]
    reference: str
    candidates: tuple[CandidateInvariance, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    exit_code: int = 3
