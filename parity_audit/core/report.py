"""The types of judged results (deltas, findings, patches, verdicts and the Report), as report.json holds them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.types import Edit, KnobValue, NotTested, NotVisible, ReadBack

SCHEMA_VERSION = 1


class Verdict(str, enum.Enum):
    """The claim about one candidate. `PARITY` is never a default."""

    EXACT = "exact"
    PARITY = "parity"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SiteDelta:
    """The distance between candidate and reference at one site: the worst of all probes that show it.

    `max_abs`, `rmse` and `rel` (rmse over the judge's rms) compare the candidate with the reference. `noise_ratio` is
    RMSE(candidate, judge) / RMSE(reference, judge). `introduced_ratio` is the same with both replayed on their own
    immediate inputs, None if not replayed. `worst` is the coordinate of max_abs in the site's axes.
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
    """The distance of the logits over every real position of every probe. `kl` is mean KL(reference || candidate) in
    nats."""

    max_abs: float
    mean_abs: float
    rmse: float
    rel: float
    noise_ratio: float | None
    kl: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class TokenLogits:
    """One token after which the logits differ.

    The token is at `row` and `position` of a probe; the largest difference, `max_abs`, is at the vocabulary entry
    `at_id`. `kl` is KL(reference || candidate) in nats; `reference_id` and `candidate_id` are the likeliest next tokens
    of each side. The texts are empty if the checkpoint has no tokenizer.
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
    """The difference between the candidate's own two runs of one prompt: decoded from the cache, and all tokens at
    once.

    It shows how far rounding and kernels alone move the result. At `site`, the output of the model: `rmse` is between
    the two runs; `distance` is from the decoded run to the reference (which runs all tokens at once),
    `distance_at_once` from the other run; `explained` is the share of the squared distance that is gone in the other
    run. `noise_ratio` is the largest multiple of the noise floor between the two runs, on the residual stream and the
    outputs.
    """

    site: str
    rmse: float
    distance: float
    distance_at_once: float
    explained: float
    noise_ratio: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, where, and by which evidence.

    `kind` is one of: constant, variant, mask, weights, settings, hook, sharding, unexplained. `hook`: a hook point
    shows something other than its name says; `knob` is its name, `reference_value` the site that it should show,
    `candidate_value` what it shows. `sharding`: ranks of one engine hold or compute different things, or their parts
    are put together wrongly; `evidence` has the `ranks` that are wrong.

    `departs_from_spec` names the side that is wrong: "candidate", "reference", "both", "unknown", or "neither" (a
    setting of the arithmetic, for which the spec has no value). A value that differs between layers is given for each
    of them: `{"by_layer": {"1": 16.0, "2": 24.0}}`. `confidence` is in [0, 1]; `evidence` holds the numbers that a
    sceptic would ask for.
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
    """Settings of one backend that repair findings: as data, as code, and with the values read back after applying
    them."""

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
    """The comparison of the candidate with its patches applied.

    `against` is the BACKEND string of the reference that it was compared with, empty for the given reference.
    """

    verdict: Verdict
    logits: LogitsDelta | None
    sites: tuple[SiteDelta, ...]
    target: float
    target_reached: bool
    against: str = ""


@dataclass(frozen=True, kw_only=True)
class RightReference:
    """What to use in place of a given reference that departs from the spec in `knobs`, and the unpatched candidate
    compared with it.

    `backend` is the BACKEND string for `-r`; it is empty if no setting suffices and `code` edits the loaded reference.
    `verified` says that its activations show the spec's values, or that a candidate with these values agrees with it;
    `why` says which. `verdict` and `logits` compare the candidate as shipped with it; None if it was not run.
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
    """A value of the candidate that the reference was given for a proof; layers None means everywhere.

    `by` is "setting" (the live reference has one), or "formula": the reference has no such setting. Then the formula
    with this value, applied to the candidate's inputs, reproduces the candidate's tensor up to rounding, and the
    reference continued from that tensor.
    """

    knob: str
    value: KnobValue
    layers: tuple[int, ...] | None
    by: str = "setting"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The reference with the candidate's constants, compared with the candidate: `before` as shipped, `after` with the
    constants.

    `proven` says that both now agree within the noise floor of that reference; `verdict` and `why` are of that
    comparison. `not_imposed` are findings that could not be imposed on the reference, with the reason: there it
    continued from the candidate's own tensors, and those sites were not compared.
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
    """The smallest error of one constant, in one layer alone, that this run could have detected: in the layer where it
    is hardest to see.

    `limit` None: no error that was tried there is detected. The other fields are as in `DetectionLimit`.
    """

    layer: int
    limit: float | None
    relative: float | None
    site: str


@dataclass(frozen=True, kw_only=True)
class DetectionLimit:
    """The smallest error of one constant that this run could have detected, in all layers together and in one layer
    alone.

    `limit` is in the unit of the constant, `relative` its share of `value` (of 1 if that is 0). `site` and `probe`
    would show the error first. `one_layer` is None for constants outside the blocks.
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
    """One site replaced by the same edited tensor on both sides; `same` says whether the edit has the same effect on
    the logits of both.

    The effects are the RMS by which the edit changes each side's logits. `says` describes what the candidate's edit
    does instead, if `same` is false.
    """

    site: str
    same: bool
    noise_ratio: float
    reference_effect: float
    candidate_effect: float
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """All results about one candidate. `hooks` are hook points compared under their own names, one delta each."""

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
    """The reference or the judge, as it was run."""

    backend: str
    package: str
    version: str
    settings: dict[str, Any]
    dtype: str
    device: str
    self_check: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BaselineFigure:
    """One figure of the logits of one candidate, in an earlier audit and in this one; `ratio` is None if one of them
    is 0."""

    candidate: str
    figure: str
    before: float
    now: float
    ratio: float | None
    within: bool


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The comparison of this report with an earlier one.

    `changed_question` names what differs in model, weights, reference or the tokens of a probe; if anything does, no
    figure is compared. `departures` say in words which verdicts changed and which figures left the band, in either
    direction.
    """

    band: float
    changed_question: tuple[str, ...]
    figures: tuple[BaselineFigure, ...]
    departures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole audit; `report.json` holds these fields."""

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
        """Return the report as HTML for a notebook; None if no renderer is registered."""
        return _NOTEBOOKS[-1](self) if _NOTEBOOKS else None


_NOTEBOOKS: list[Callable[[Report], str]] = []


def shown_in_notebooks_by(render: Callable[[Report], str]) -> None:
    """Register the function that renders a Report as HTML. `core` cannot import it, since rendering is built on top
    of `core`."""
    _NOTEBOOKS[:] = [render]
