"""Check that the reference agrees with itself, with one run of a batch and one run of its other attention implementation.

- Causality: tokens from the middle on are replaced; logits before them must not change.
- Padding: the first half runs again, padded on the left; its logits must not change.
- Implementation: eager and sdpa of one library must compute the same function. They differ if a kernel drops a term.

A change is measured against the noise floor at the same positions: RMSE(run, capture) / RMSE(capture, judge).
Another batch may round differently, so a change is reported only if it is far beyond the floor.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from parity_audit.capture.probes import BATCH, FIRST, ROWS, TWIN
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.checks.limits import chosen_probe
from parity_audit.compare.floor import noise_ratio
from parity_audit.core.errors import BackendFailed
from parity_audit.core.limits import INNER_RATIO
from parity_audit.core.types import Edit, Probe, SiteTap

LOGITS = "logits"
OTHER = {"eager": "sdpa", "sdpa": "eager"}
IMPLEMENTATION = "config._attn_implementation"
LOOKED_UP = ("_supports_sdpa", "_supports_attention_backend")
"""Flags of transformers models that have both implementations and look up the current one in every attention call."""


def invariance_notes(session: Session, capture: Capture, judge: Capture, out: Path) -> list[str]:
    """Return one line per way in which the reference does not agree with itself."""
    probe = chosen_probe(capture.probes)
    if probe.sites != "all" or LOGITS not in capture.sites(probe.name):
        return []
    own, exact = (side.tensor(probe.name, LOGITS)[0].double() for side in (capture, judge))
    notes = _rows(capture, judge)
    notes += _positions(session, probe, own, exact, out / "invariance")
    notes += _implementations(session, probe, own, exact, out / "implementation")
    shutil.rmtree(out, ignore_errors=True)
    return notes


def causality_and_padding_probe(probe: Probe) -> tuple[Probe, int]:
    """Return a probe of two rows made from the given probe's first row, and the length of that row's first half.

    One row has its second half replaced; the other is the first half alone, padded on the left.
    """
    row = probe.token_ids[0]
    half = len(row) // 2
    tail = tuple(reversed(row[: len(row) - half]))
    rows = (row[:half] + tail, (row[-1],) * (len(row) - half) + row[:half])
    mask = ((1,) * len(row), (0,) * (len(row) - half) + (1,) * half)
    return Probe(name="self-check", purpose="causality and padding", token_ids=rows, mask=mask), half


def _rows(capture: Capture, judge: Capture) -> list[str]:
    """Report it if a row's logits change inside a batch; one row of probe `batch` is the beginning of probe `short`."""
    if not all(LOGITS in side.sites(name) for side in (capture, judge) for name in (FIRST, BATCH)):
        return []
    among = capture.tensor(BATCH, LOGITS)[TWIN].double()
    own, exact = (side.tensor(FIRST, LOGITS)[0, : len(among)].double() for side in (capture, judge))
    ratio = apart(among, own, exact, capture.manifest.dtype)
    said = f"in a batch of {ROWS} a row's logits depend on the other rows ({ratio:.2g}x the noise floor)"
    return [f"the reference is not independent by row: {said}"] if ratio > INNER_RATIO else []


def _positions(session: Session, probe: Probe, own: Tensor, exact: Tensor, out: Path) -> list[str]:
    changed, half = causality_and_padding_probe(probe)
    seen = take_capture(session, [changed], out, choose=_only_logits).tensor(changed.name, LOGITS).double()
    dtype = session.plan.dtype
    future = apart(seen[0, :half], own[:half], exact[:half], dtype)
    padded = apart(seen[1, -half:], own[:half], exact[:half], dtype)
    lines = {
        f"the reference is not causal: other tokens from position {half} on move logits before it": future,
        "padding on the left moves the reference's logits": padded,
    }
    return [f"{line} ({ratio:.2g}x the noise floor)" for line, ratio in lines.items() if ratio > INNER_RATIO]


def _implementations(session: Session, probe: Probe, own: Tensor, exact: Tensor, out: Path) -> list[str]:
    """Report it if the other attention implementation computes another function.

    Only transformers models that can switch while loaded are tested. Others are built with one implementation: after a switch
    they would keep it but receive the masks of the other.
    """
    about = session.description()
    mine = str(about.settings.get("attn_implementation"))
    if session.plan.backend_key != "hf" or mine not in OTHER:
        return []
    flags = (Edit(op="set", path=flag, value=True) for flag in LOOKED_UP)
    try:
        read = {
            item.path: item.before
            for item in session.apply((*flags, Edit(op="set", path=IMPLEMENTATION, value=OTHER[mine])))
        }
        if not all(read[flag] is True for flag in LOOKED_UP):
            return []
        seen = take_capture(session, [probe], out, choose=_only_logits).tensor(probe.name, LOGITS)[0].double()
    except BackendFailed:  # this release cannot switch, so there is nothing to report
        return []
    finally:
        session.restore()
    ratio = apart(seen, own, exact, session.plan.dtype)
    if ratio <= INNER_RATIO:
        return []
    return [f"the reference's own {OTHER[mine]} does not compute what its {mine} does ({ratio:.2g}x the noise floor)"]


def _only_logits(tap: SiteTap, probe: Probe) -> bool:
    return tap.site == LOGITS


def apart(seen: Tensor, own: Tensor, exact: Tensor, dtype: str) -> float:
    """Return RMSE(seen, own) of two runs `[p d_vocab]` as a multiple of the noise floor RMSE(own, exact)."""

    def rms(value: Tensor) -> float:
        return float(value.square().mean().sqrt())

    return noise_ratio(rms(seen - own), rms(own - exact), rms(exact), dtype)
