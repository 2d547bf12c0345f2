"""The judged nouns: deltas, findings, patches, verdicts and the Report, as report.json carries them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.types import Edit, KnobValue, NotTested, NotVisible, ReadBack

SCHEMA_VERSION = 1


class Verdict(str, enum.Enum):
    """What is claimed about one candidate. `PARITY` is never a default."""

    EXACT = "exact"
    PARITY = "parity"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SiteDelta:
    """Distance of candidate and reference at one site, over all probes that show it (the worst is reported).

    `max_abs`, `rmse`, `rel` (rmse over the judge's rms) are candidate against reference;
    `noise_ratio` is RMSE(candidate, judge) / RMSE(reference, judge);
    `introduced_ratio` is the same with both replayed on their own immediate inputs, None when not replayed.
    `worst` is the coordinate of max_abs in the site's axes.
    """

    site: str
    layer: int | None
    probe: str
    max_abs: float
    rmse: float
    rel: float
    noise_ratio: float | None
    introduced_ratio: float | None = None
    worst: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsDelta:
    """Distance at the logits over every real position of every probe. `kl` is mean KL(reference || candidate) in nats."""

    max_abs: float
    mean_abs: float
    rmse: float
    rel: float
    noise_ratio: float | None
    kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class TokenLogits:
    """One token behind which the logits differ: at `row` and `position` of a probe, by `max_abs` at the vocabulary entry `at_id`.

    `kl` is KL(reference || candidate) in nats, `reference_id` and `candidate_id` are the likeliest next tokens of each side.
    The texts are empty where the checkpoint has no tokenizer.
    """

    probe: str
    row: int
    position: int
    token_id: int
    max_abs: float
    at_id: int
    kl: float
    reference_id: int
    candidate_id: int
    text: str = ""
    reference_text: str = ""
    candidate_text: str = ""


@dataclass(frozen=True, kw_only=True)
class OwnVariation:
    """The candidate's own runs of one prompt, decoded from the cache and all at once: how far apart rounding and kernels take them.

    At `site`, what the model returns: `rmse` between its two runs, `distance` of the decoded run to the reference (which runs all
    at once), `distance_at_once` of the other one, and `explained`, the share of the squared distance that is gone there.
    `noise_ratio` is the largest multiple of the noise floor between its two runs, on the residual stream and the outputs.
    """

    site: str
    rmse: float
    distance: float
    distance_at_once: float
    explained: float
    noise_ratio: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, where, and how we know.

    `kind` is one of: constant, variant, mask, weights, settings, hook, sharding, unexplained. `hook`: a hook point shows
    something else than its name says; `knob` is its name, `reference_value` the site that it should show, `candidate_value`
    what it shows. `sharding`: ranks of one engine hold or compute different things, or their parts are put together wrongly;
    `evidence` has the `ranks` that are wrong.
    `departs_from_spec` names the side that is wrong: "candidate", "reference", "both", "unknown", or "neither"
    (a setting of the arithmetic, on which the spec is silent).
    A value that layers do not share says that of each one: `{"by_layer": {"1": 16.0, "2": 24.0}}`.
    `confidence` in [0, 1]; `evidence` holds the numbers that a sceptic would ask for.
    """

    knob: str
    kind: str
    layers: tuple[int, ...] | None
    site: str
    reference_value: KnobValue
    candidate_value: KnobValue
    spec_value: KnobValue = None
    evidence: dict[str, Any] = field(default_factory=dict)
    confidence: float = 0.0
    departs_from_spec: str = "unknown"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Settings of one backend that repair findings: as data, as code, and with what was read back."""

    knob: str
    backend: str
    value: KnobValue
    edits: tuple[Edit, ...]
    code: str
    fixes: tuple[str, ...]
    note: str = ""
    read_back: tuple[ReadBack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Patched:
    """The candidate again, with its patches applied.

    `against` is the BACKEND string of the reference that it was judged against, empty for the one that was given.
    """

    verdict: Verdict
    logits: LogitsDelta | None
    sites: tuple[SiteDelta, ...]
    target: float
    target_reached: bool
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class RightReference:
    """The given reference departs from the spec in `knobs`: what to take in its place, and the candidate as shipped against that.

    `backend` is the BACKEND string for `-r`; empty where no setting does it and `code` edits the loaded reference.
    `verified` says that its activations show the spec's values, or that a candidate which has them agrees with it; `why`
    says which. `verdict` and `logits` compare the candidate as shipped with it; None where it was not run.
    """

    knobs: tuple[str, ...]
    backend: str
    code: str
    verified: bool
    why: str
    verdict: Verdict | None = None
    logits: LogitsDelta | None = None


@dataclass(frozen=True, kw_only=True)
class Imposed:
    """A value of the candidate that the reference was given, for a proof; layers None is everywhere.

    `by` is "setting" (the live reference's), or "formula": the reference has no such setting, and the formula with this value makes
    the candidate's tensor of the candidate's inputs up to rounding, from which the reference then went on.
    """

    knob: str
    value: KnobValue
    layers: tuple[int, ...] | None
    by: str = "setting"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The reference with the candidate's constants, against the candidate: `before` as shipped, `after` with them.

    `proven` says that both now agree within the noise floor of that reference; `verdict` and `why` are of that comparison.
    `not_imposed` are findings that the reference could not be given, with the reason: there it went on from the candidate's
    own tensors, and those sites were not compared.
    """

    proven: bool
    statement: str
    imposed: tuple[Imposed, ...]
    verdict: Verdict
    why: str
    before: LogitsDelta | None
    after: LogitsDelta | None
    not_imposed: tuple[NotTested, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerLimit:
    """The smallest error of one constant that this run could have seen in one layer alone: the one where it shows least.

    `limit` None: no error that was tried there shows at all. Other fields as in `DetectionLimit`.
    """

    layer: int
    limit: float | None
    relative: float | None
    site: str


@dataclass(frozen=True, kw_only=True)
class DetectionLimit:
    """The smallest error of one constant that this run could have seen: in every layer, and in one layer alone.

    `limit` is in the unit of the constant, `relative` its share of `value` (of 1 where that is 0); `site` and `probe`
    would show it first. `one_layer` is None for constants that blocks do not have.
    """

    knob: str
    value: float
    limit: float
    relative: float
    site: str
    probe: str
    one_layer: LayerLimit | None = None


@dataclass(frozen=True, kw_only=True)
class HookEdit:
    """One site replaced by the same edited tensor on both sides: `same` says whether the logits then agree.

    The effects are the RMS by which the edit moves the logits; `says` is what it does where it does something else.
    """

    site: str
    same: bool
    noise_ratio: float
    reference_effect: float
    candidate_effect: float
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Everything about one candidate. `hooks` are hook points read under their own names, one delta each."""

    backend: str
    package: str
    version: str
    settings: dict[str, Any]
    dtype: str
    device: str
    verdict: Verdict
    why: str
    logits: LogitsDelta | None = None
    worst_tokens: tuple[TokenLogits, ...] = ()
    sites: tuple[SiteDelta, ...] = ()
    first_divergence: dict[str, Any] | None = None
    findings: tuple[Finding, ...] = ()
    right_reference: RightReference | None = None
    patches: tuple[Patch, ...] = ()
    patched: Patched | None = None
    proof: Proof | None = None
    hooks: tuple[SiteDelta, ...] = ()
    hook_edits: tuple[HookEdit, ...] = ()
    warnings: tuple[str, ...] = ()
    not_visible: tuple[NotVisible, ...] = ()
    not_tested: tuple[NotTested, ...] = ()
    detection_limits: dict[str, float] = field(default_factory=dict)
    detection: tuple[DetectionLimit, ...] = ()
    own_variation: OwnVariation | None = None
    error: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<Candidate {self.backend} {self.version}: {self.verdict.value}, findings: {len(self.findings)}>"


@dataclass(frozen=True, kw_only=True)
class Side:
    """The reference or the judge, as it ran."""

    backend: str
    package: str
    version: str
    settings: dict[str, Any]
    dtype: str
    device: str
    self_check: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BaselineFigure:
    """One figure of the logits of one candidate, in an earlier audit and in this one; `ratio` is None where one of them is 0."""

    candidate: str
    figure: str
    before: float
    now: float
    ratio: float | None
    within: bool


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An earlier report that this one was held against.

    `changed_question` names what differs in model, weights, reference or the tokens of a probe: then no figure was
    compared. `departures` say in words which verdicts changed and which figures left the band, in either direction.
    """

    band: float
    changed_question: tuple[str, ...]
    figures: tuple[BaselineFigure, ...]
    departures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole audit; `report.json` is this, field by field."""

    schema_version: int = SCHEMA_VERSION
    model: str
    architecture: str
    spec: str
    weights: dict[str, Any]
    reference: Side | None
    judge: Side | None
    probes: tuple[dict[str, Any], ...]
    candidates: tuple[Candidate, ...]
    environment: dict[str, Any]
    seconds: dict[str, float]
    exit_code: int
    not_tested: tuple[NotTested, ...] = ()
    error: dict[str, Any] | None = None
    baseline: Baseline | None = None

    def __repr__(self) -> str:
        return f"<Report on {self.model}: {list(self.candidates)}, exit code {self.exit_code}>"

    def _repr_html_(self) -> str | None:
        """What a notebook shows of it, once a renderer has registered."""
        return _NOTEBOOKS[-1](self) if _NOTEBOOKS else None


_NOTEBOOKS: list[Callable[[Report], str]] = []


def shown_in_notebooks_by(render: Callable[[Report], str]) -> None:
    """Register what draws a Report as HTML; reports are drawn above `core`, which imports none of it."""
    _NOTEBOOKS[:] = [render]
