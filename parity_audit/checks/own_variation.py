"""Measure how much a candidate's results for the same tokens vary with the run's shape: decoded or prefilled, batched or alone.

Kernels are chosen by the number of rows, so a correct engine may round differently in a decode step or beside other rows. That
is no error in the function it computes. The candidate is compared with itself, in multiples of the noise floor
(`parity-audit invariance` does the same for many more shapes).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from parity_audit.capture.probes import BATCH, FIRST, TWIN
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture, whole_in_steps
from parity_audit.compare.floor import noise_ratio
from parity_audit.compare.variation import Variation
from parity_audit.core.limits import PARITY_RATIO, limit_of
from parity_audit.core.report import OwnVariation
from parity_audit.core.sites import ATTENTION_SITES, LOGITS, RETURNED
from parity_audit.core.types import NotTested, Probe

WHOLE = "at-once"
WHAT = "how far the candidate's own runs are apart"


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """The reference and the judge, whose distance is pure rounding: the noise floor."""

    reference: Capture
    judge: Capture
    dtype: str

    def ratio(self, apart: Tensor, probe: str, site: str, row: int, positions: int) -> float:
        """Return the RMS of `apart`, the difference `[pos ...]` of two runs, as a multiple of the noise floor.

        The floor is taken at the first `positions` positions of a row.
        """
        own, exact = (_row(side, probe, site, row)[:positions] for side in (self.reference, self.judge))
        return noise_ratio(_rms(apart), _rms(own - exact), _rms(exact), self.dtype)


def own_variation(
    session: Session, capture: Capture, yardstick: Yardstick, out: Path
) -> tuple[Variation, OwnVariation | None, tuple[NotTested, ...]]:
    """Compare a row of a batch with the same row alone, and the decoded probe with one prefill of all its tokens.

    Returns the ratios by site, the summary for the report, and what could not be measured.
    """
    batched = _batched(capture, yardstick)
    probe = next((own for own in capture.probes if own.decode_from is not None and capture.sites(own.name)), None)
    if probe is None:
        return Variation(batched=batched), None, ()
    at_once = replace(probe, name=WHOLE, decode_from=None)
    try:
        whole = take_capture(session, (at_once,), out, choose=lambda tap, _: whole_in_steps(tap, probe))
        decoded, said = _decoded(probe, capture, whole, yardstick)
    except Exception as error:
        return Variation(batched=batched), None, (NotTested(what=WHAT, why=f"{type(error).__name__}: {error}"),)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Variation(decoded=decoded, batched=batched), said, ()


def _batched(capture: Capture, yardstick: Yardstick) -> dict[str, float]:
    """Return, by site, the ratio between a row of probe `batch` and the same tokens alone, the start of the first probe."""
    found = {}
    for site in _shared(BATCH, capture, yardstick) & capture.sites(FIRST):
        among, alone = _row(capture, BATCH, site, TWIN), _row(capture, FIRST, site, 0)
        if among.shape[1:] == alone.shape[1:]:
            found[site] = yardstick.ratio(among - alone[: len(among)], BATCH, site, TWIN, len(among))
    return found


def _decoded(
    probe: Probe, capture: Capture, whole: Capture, yardstick: Yardstick
) -> tuple[dict[str, float], OwnVariation | None]:
    found, values = {}, {}
    for site in _shared(probe.name, capture, yardstick) & whole.sites(WHOLE):
        own, once = _row(capture, probe.name, site, 0), _row(whole, WHOLE, site, 0)
        if own.shape == once.shape:
            found[site] = yardstick.ratio(own - once, probe.name, site, 0, len(own))
            values[site] = own, once, _row(yardstick.reference, probe.name, site, 0)
    return found, _said(values, found)


def _said(values: Mapping[str, tuple[Tensor, Tensor, Tensor]], ratios: Mapping[str, float]) -> OwnVariation | None:
    """Summarise the variation at the model's output, else at the logits; None if neither was captured.

    `explained` is the share of the squared distance to the reference that disappears when the candidate prefills all tokens.
    """
    site = next((site for site in (RETURNED, LOGITS) if site in values), None)
    if site is None:
        return None
    decoded, once, reference = values[site]
    distance, left = _rms(decoded - reference), _rms(once - reference)
    return OwnVariation(
        site=site, rmse=_rms(decoded - once), distance=distance, distance_at_once=left,
        explained=max(0.0, 1.0 - (left / distance) ** 2) if distance else 0.0,
        noise_ratio=max(ratio for own, ratio in ratios.items() if limit_of(own) == PARITY_RATIO),
    )  # fmt: skip


def _shared(probe: str, capture: Capture, yardstick: Yardstick) -> set[str]:
    """Return the sites `[batch pos ...]` that the candidate, the reference and the judge all show in the same shape."""
    sides = (yardstick.reference, yardstick.judge)
    both = capture.sites(probe).intersection(*(side.sites(probe) for side in sides))
    return {site for site in both if not site.endswith(ATTENTION_SITES) and _one_shape(probe, site, (capture, *sides))}


def _one_shape(probe: str, site: str, sides: Iterable[Capture]) -> bool:
    return len({side.shape(probe, site) for side in sides}) == 1


def _row(side: Capture, probe: str, site: str, row: int) -> Tensor:
    return side.tensor(probe, site)[row].double()


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
