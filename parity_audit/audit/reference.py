"""The reference, which candidates are compared with, and its judge.

The judge is the reference run in true float64. If the reference's program cannot run in float64, the judge is the
architecture's definition in transformers, which can. The reference itself is then measured first. If it computes the same
function as the definition, its own rounding is the noise floor. If it does not, its error must not count as rounding: the
floor is then the definition's rounding, and candidates are measured by their distance to the reference (see
`compare.deltas.compare`).
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
"""The backend that judges a reference which cannot run in true float64."""
FLOAT64_BACKENDS = (JUDGES, "spec")
"""The backends that can run in true float64."""
OTHER_EXPERTS = "the candidate sends tokens to other experts where their scores differ by less than rounding"
FOLLOWED = f"{OTHER_EXPERTS}; the reference and its judge were run with the same choice there"
OWN_NOT_FOLLOWED = (
    "the judge could not be run with the experts that the reference chose where scores differ by less than rounding"
)
NOT_FOLLOWED = f"{OTHER_EXPERTS}, which counts as an error here: the reference could not be run with the same choice"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference's session and capture, the judge's capture, and the effect of small errors on the outputs.

    `judging` is the session that runs in float64; it is `session` itself if that can. `judge` is its capture, None if no
    judge could be run. `definition` is the native run of `judging`; it is set only if the reference does not compute the
    same function as the definition. `sensitivity` is the measured effect of small errors, from which detection limits
    follow. `held` are captures of the judging session, which are deleted together with the reference's.

    `followed` says for which tokens the reference and its judge were run with the experts that a candidate chose, or why
    that was not possible; `plain` is the reference before that. `replays` are the judge's replays of runs of either side,
    shared by all candidates of one audit.
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
        """Return the run whose distance to the judge is rounding alone: the definition if it is set, else the reference."""
        return self.definition or self.capture

    def compared(self, capture: Capture, allowed: Allowance | None = None) -> Comparison:
        """Compare a candidate's capture with this reference.

        If the candidate's weights are processed, `allowed` says at which sites the mean is subtracted from both sides first,
        and which sites are not compared.
        """

        def seen(side: Capture) -> TensorSource:
            return side if allowed is None else Allowed(side, allowed)

        def if_there(side: Capture | None) -> TensorSource | None:
            return None if side is None else seen(side)

        return compare(
            seen(capture), seen(self.capture), if_there(self.judge), dtype=self.dtype,
            definition=if_there(self.definition),
        )  # fmt: skip

    def following(self, capture: Capture, out: Path, *, make_room: Callable[[], None]) -> Reference:
        """Return the reference, run with the experts that the candidate chose where rounding decides the choice.

        If two experts' router scores differ by less than rounding, two correct programs may choose different experts. The
        outputs can then be compared only after the reference has taken the candidate's choice. If no choice differs in this
        way, the reference itself is returned. If the runs fail, it is returned with a note in `followed`.

        Args:
            make_room: called before the reference is loaded again, if it was too large to stay in memory.
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
        """Return whether the reference can be run with a candidate's choice of experts: only the judging program can."""
        return self.judging is self.session

    def release(self) -> None:
        """Release both models from memory."""
        self.session.release()
        self.judging.release()


def take_reference(
    session: Session, judging: Session, probes: tuple[Probe, ...], *, folder: Path, keep: bool
) -> Reference:
    """Capture the reference and its judge.

    Args:
        session: the reference.
        judging: the session that runs in float64; it is `session` itself if that can.
        keep: whether both models may be in memory at once.

    Raises:
        NotJudged: the reference could not be captured, or it is its own judge and its float64 run failed. If another
            program is the judge and fails, the reference has no judge, and its notes say why.
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
    """Return the judge's capture, run with the experts that the reference chose where rounding decides the choice.

    If these runs fail, the judge's capture is returned as it was, with a note that says why.
    """
    try:
        found = follow(session, pair, pair.floor, probes, folder.with_name("choices-of-reference"))
    except NotJudged as error:
        return pair.judge, (f"{OWN_NOT_FOLLOWED}: {error.message}",)
    return found.pair.judge, ()


def _check(
    session: Session, judging: Session, capture: Capture, definition: Capture, judge: Capture, dtype: str
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the reference departs from the definition, and the notes about its judge for the report."""
    verdict, why = judge_comparison(compare(capture, definition, judge, dtype=dtype))
    departs = verdict not in (Verdict.PARITY, Verdict.EXACT)
    about = judging.description()
    judged = f"judged by {about.backend} {about.version} in float64: {session.label} cannot run so itself"
    if not departs:
        return False, (judged,)
    return True, (judged, f"the reference itself departs from {about.backend} {about.version}: {why}")
