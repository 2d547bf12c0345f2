"""The believed side and its judge.

The judge is the reference in true float64. A program that cannot run so is judged by the architecture's definition in
transformers, which can. Then the reference itself is measured first: where it computes the definition's function, its
own rounding is the noise floor. Where it does not, its error must not pass for rounding: the floor is that of the
definition, and candidates are measured by their distance to the reference (see `compare.deltas.compare`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import reusable_capture
from parity_audit.checks.limits import Sensitivity
from parity_audit.compare.choices import Pair
from parity_audit.compare.deltas import Comparison, compare
from parity_audit.compare.processing import Allowance, Allowed
from parity_audit.compare.source import TensorSource
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Verdict
from parity_audit.core.types import Probe
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.replay import Replays
from parity_audit.diagnose.routing import follow

JUDGES = "hf"
"""The backend that judges a program which cannot run in true float64."""
FLOAT64_BACKENDS = (JUDGES, "spec")
"""The backends that can."""
OTHER_EXPERTS = "the candidate sends tokens to other experts where their scores differ by less than rounding"
FOLLOWED = f"{OTHER_EXPERTS}; the reference and its judge were run with the same choice there"
OWN_NOT_FOLLOWED = (
    "the judge could not be run with the experts that the reference chose where scores differ by less than rounding"
)
NOT_FOLLOWED = f"{OTHER_EXPERTS}, which counts as an error here: the reference could not be run with the same choice"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A session to ask, its capture, the judge's, and what small errors would do.

    `judging` is the session that runs in float64: the reference's own where it can. `definition` is that session's
    native run, set only where the reference does not compute what the definition computes. `held` are captures of the
    judging session, to be dropped with the reference's. `followed` says which choices of experts both runs took over from a
    candidate, or why they could not; `plain` is the reference before that. `replays` are what the judge made of runs of either
    side, for all candidates of one audit.
    """

    session: Session
    judging: Session
    capture: Capture
    judge: Capture | None
    probes: tuple[Probe, ...]
    dtype: str
    definition: Capture | None = None
    sensitivity: Sensitivity | None = None
    notes: tuple[str, ...] = ()
    held: tuple[Capture, ...] = ()
    followed: tuple[str, ...] = ()
    plain: Reference | None = None
    replays: Replays = field(default_factory=dict)

    @property
    def floor(self) -> Capture:
        """The run whose distance to the judge is rounding."""
        return self.definition or self.capture

    def compared(self, capture: Capture, allowed: Allowance | None = None) -> Comparison:
        """A candidate's capture against this reference, in the coordinates that processed weights leave."""

        def seen(side: Capture) -> TensorSource:
            return side if allowed is None else Allowed(side, allowed)

        def if_there(side: Capture | None) -> TensorSource | None:
            return None if side is None else seen(side)

        return compare(
            seen(capture), seen(self.capture), if_there(self.judge), dtype=self.dtype,
            definition=if_there(self.definition),
        )  # fmt: skip

    def following(self, capture: Capture, out: Path, *, make_room: Callable[[], None]) -> Reference:
        """The reference with the experts that a candidate chose where rounding decides; itself where nothing was to be followed.

        Args:
            make_room: called before a model that was too large to stay in memory is loaded again.
        """
        if self.judge is None or not self.can_follow:
            return self
        alone = not self.session.is_loaded
        pair = Pair(judge=self.judge, floor=self.capture)
        try:
            found = follow(self.session, pair, capture, self.probes, out, before_runs=make_room if alone else None)
        except NotJudged as error:
            return dataclasses.replace(self, followed=(f"{NOT_FOLLOWED}: {error.message}",))
        if not found.told:
            return self
        if alone:
            self.session.release()
        return dataclasses.replace(
            self,
            judge=found.pair.judge,
            capture=found.pair.floor,
            plain=self,
            followed=tuple(f"{FOLLOWED} ({told})" for told in found.told),
        )

    @property
    def can_follow(self) -> bool:
        """Whether the reference itself can be run with the choices of another: only the program that judges can."""
        return self.judging is self.session

    def release(self) -> None:
        """Let both models go."""
        self.session.release()
        self.judging.release()


def take_reference(
    session: Session, judging: Session, probes: tuple[Probe, ...], *, folder: Path, keep: bool
) -> Reference:
    """The reference's capture and its judge's; `judging` is `session` itself where that can run in float64.

    Args:
        keep: whether both models may be in memory at once.

    Raises:
        NotJudged: the reference could not be captured. A judge that cannot be had is a note.
    """
    capture = reusable_capture(session, probes, folder, with_weights=True)
    dtype = session.plan.dtype
    session.progress.update("judge", "the reference in true float64")
    bare = Reference(session=session, judging=judging, capture=capture, judge=None, probes=probes, dtype=dtype)
    if not keep and judging is not session:
        session.release()
    try:
        judge = reusable_capture(judging, probes, folder, precision=FLOAT64)
        definition = capture if judging is session else reusable_capture(judging, probes, folder)
    except NotJudged as error:
        if judging is session:
            raise
        why = f"{session.label} cannot run in float64, and {judging.label} could not judge it: {error.message}"
        return dataclasses.replace(bare, notes=(why,))
    if judging is session:
        own, notes = _with_own_choices(session, Pair(judge=judge, floor=capture), probes, folder)
        return dataclasses.replace(bare, judge=own, held=(judge,), notes=notes)
    departs, notes = _check(session, judging, capture, definition, judge, dtype)
    return dataclasses.replace(
        bare, judge=judge, notes=notes, definition=definition if departs else None, held=(judge, definition)
    )


def _with_own_choices(
    session: Session, pair: Pair[Capture], probes: tuple[Probe, ...], folder: Path
) -> tuple[Capture, tuple[str, ...]]:
    """The judge with the experts that the reference itself chose where rounding decides, or as it was and why."""
    try:
        found = follow(session, pair, pair.floor, probes, folder.with_name("choices-of-reference"))
    except NotJudged as error:
        return pair.judge, (f"{OWN_NOT_FOLLOWED}: {error.message}",)
    return found.pair.judge, ()


def _check(
    session: Session, judging: Session, capture: Capture, definition: Capture, judge: Capture, dtype: str
) -> tuple[bool, tuple[str, ...]]:
    """Whether the reference departs from the definition, and what to say about its judge."""
    verdict, why = judge_comparison(compare(capture, definition, judge, dtype=dtype))
    departs = verdict not in (Verdict.PARITY, Verdict.EXACT)
    about = judging.description()
    judged = f"judged by {about.backend} {about.version} in float64: {session.label} cannot run so itself"
    if not departs:
        return False, (judged,)
    return True, (judged, f"the reference itself departs from {about.backend} {about.version}: {why}")
