"""Check whether a candidate returns the same logits when it runs the same tokens again.

If two runs in direct succession differ, dropout is on or there is a race, and the noise could be mistaken for any cause. If
they agree with each other but not with the first run of the audit, the model keeps state: the runs in between changed it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.checks.limits import chosen_probe
from parity_audit.compare.floor import guard
from parity_audit.core.report import Finding
from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.core.types import Probe, SiteTap
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.diagnose.evidence import f64, real
from parity_audit.diagnose.thresholds import MANY_ROUNDINGS

DETERMINISM, STATE = "determinism", "state"
ONCE_MORE = "once-more"
UNSTEADY = "two runs of the same tokens differ: dropout left on, or a race; nothing else can be told until they agree"
REMEMBERS = (
    "the model remembers what it ran before: {probe}, run again after the other probes, gives other logits than the first "
    "time, and the same ones from then on"
)
UNREPEATABLE = "no setting is known for it: put the model into eval mode, and look for what draws random numbers"
CHANGED = "no setting is known for it: load the model afresh, or find the buffer or cache that a call leaves changed"


def repeat_finding(session: Session, capture: Capture, dtype: str, out: Path) -> Finding | None:
    """Return a finding if two successive runs differ by more than rounding, or if they differ from the audit's first run.

    Raises:
        NotJudged: the backend failed.
    """
    probe = chosen_probe(capture.probes)
    twice = (probe, replace(probe, name=ONCE_MORE))
    runs = take_capture(session, twice, out, choose=_only_logits)
    now, after = (_outputs(runs, each) for each in twice)
    shutil.rmtree(out, ignore_errors=True)
    return _finding(DETERMINISM, UNSTEADY, now, after, probe.name, dtype) or _finding(
        STATE, REMEMBERS.format(probe=f"`{probe.name}`"), now, _outputs(capture, probe), probe.name, dtype
    )


def _only_logits(tap: SiteTap, probe: Probe) -> bool:
    return tap.site == LOGITS


def _outputs(capture: Capture, probe: Probe) -> Tensor:
    """Return the model's output at the real tokens `[token d_vocab]`, or the captured logits if the output is not known."""
    site = RETURNED if RETURNED in capture.sites(probe.name) else LOGITS
    return f64(capture.tensor(probe.name, site)[real(probe)])


def _finding(knob: str, message: str, now: Tensor, before: Tensor, probe: str, dtype: str) -> Finding | None:
    """Return a finding if two runs differ by more than rounding, else None."""
    apart, size = (float(value.square().mean().sqrt()) for value in (now - before, before))
    ratio = apart / guard(size, dtype)
    if ratio <= MANY_ROUNDINGS:
        return None
    return Finding(
        knob=knob, kind="settings", layers=None, site=LOGITS, reference_value="repeatable", candidate_value=apart,
        spec_value="repeatable", confidence=BY_COMPARISON, departs_from_spec="candidate",
        evidence={"rmse_between_runs": apart, "probe": probe, "roundings": ratio}, message=message,
    )  # fmt: skip
