"""What `parity-audit invariance` found, as invariance.json carries it. Logits and log-probabilities are in nats."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.types import NotTested

INVARIANCE_SCHEMA_VERSION = 1


class Invariance(str, enum.Enum):
    """How a result depends on the conditions of its run.

    `bitwise`: not at all. `class-only`: its bits depend on the shape of the run alone (how many rows each kernel is given), and
    a run of the same shape with other neighbours, or at another place, has the same bits. `numeric`: the bits depend on
    more than that, within the noise floor. `broken`: it moves by more than rounding explains. `error`: it could not be run.
    """

    BITWISE = "bitwise"
    CLASS_ONLY = "class-only"
    NUMERIC = "numeric"
    BROKEN = "broken"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SiteChange:
    """How far one site is from its value in the base condition.

    `ulp` is the largest difference in units of the last place of the largest number of that token's vector. `ratio` is the
    largest RMSE of a token over the noise floor at that site and position, None where no floor is known; `position`
    is that token.
    """

    site: str
    max_abs: float
    ulp: float
    ratio: float | None
    position: int


@dataclass(frozen=True, kw_only=True)
class ConditionResult:
    """One way to run the subject, against `base`.

    `bits` hashes every site at the compared positions. `nats` is the largest difference of a log-probability over the
    vocabulary, `logits_max_abs` of a logit. `repeatable`: whether a second run gave the same bits, None where it was not needed.
    `facts` is what the program itself counted. A condition that was not run has a `gap` and no verdict.
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
    """One question: its conditions grouped into classes of equal bits, and the worst verdict of them.

    `classes` holds the names of conditions with equal bits, first those that equal the base. `words` prints them, sizes as
    "{1} {2,3} {>=4}".
    """

    name: str
    question: str
    verdict: Invariance | None
    classes: tuple[tuple[str, ...], ...]
    words: str
    conditions: tuple[ConditionResult, ...]


@dataclass(frozen=True, kw_only=True)
class OperationClasses:
    """One operation by number of rows: sizes with equal bits, and the sizes at which its kernel changes.

    `ulp` is the largest difference to the first size, in units of the last place of the largest number of the row.
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
    """A greedy completion that leaves the one of the prompt alone: at which token, and whether rounding can turn that choice.

    `margin` is the difference of the two largest logits there, `moved` the largest movement of a logit that was measured. A
    flip needs two logits to move against each other by the margin, so twice the largest movement bounds a `tie`.
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
    """Greedy completions of one prompt under changing batches."""

    runs: int
    tokens: int
    unique: int
    batches: tuple[int, ...]
    divergent: tuple[Divergent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Control:
    """The negative control: whether anything differed at all, so that equal bits mean something. `where` says what did."""

    fired: bool
    where: str


@dataclass(frozen=True, kw_only=True)
class CandidateInvariance:
    """One backend; `code` is that of the error that ended it."""

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
    """The whole answer; `reference` is the backend whose float64 run measures the noise floor."""

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
