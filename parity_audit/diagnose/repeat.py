"""Does a candidate say the same thing twice? Dropout that was left on, or a race, would pass for any cause at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.deltas import rmse_to_forced
from parity_audit.compare.floor import guard
from parity_audit.core.report import Finding
from parity_audit.core.sites import LOGITS
from parity_audit.core.types import Probe, SiteTap
from parity_audit.diagnose.limits import chosen_probe

KNOB = "determinism"
ROUNDINGS = 100.0
"""Threads may add in another order from run to run; that stays far below."""


def repeat_finding(session: Session, capture: Capture, dtype: str, out: Path) -> Finding | None:
    """A finding where two runs of the same tokens differ by more than rounding.

    Raises:
        NotJudged: the backend failed.
    """
    probe = chosen_probe(capture.probes)

    def choose(tap: SiteTap, probe: Probe) -> bool:
        return tap.site == LOGITS

    again = take_capture(session, [probe], out, choose=choose)
    apart, size = rmse_to_forced(again, capture, probe, LOGITS)
    shutil.rmtree(out, ignore_errors=True)
    ratio = apart / guard(size, dtype)
    if ratio <= ROUNDINGS:
        return None
    return Finding(
        knob=KNOB, kind="settings", layers=None, site=LOGITS, reference_value="repeatable", candidate_value=apart,
        spec_value="repeatable", confidence=0.99, departs_from_spec="candidate",
        evidence={"rmse_between_runs": apart, "probe": probe.name, "roundings": ratio},
        message="two runs of the same tokens differ: dropout left on, or a race; nothing else can be told until they agree",
    )  # fmt: skip
