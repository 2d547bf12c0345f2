"""Run a condition in a worker, and read the captured values of the subject's row."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.core.errors import BackendFailed
from parity_audit.core.manifest import Entry
from parity_audit.core.sites import ATTENTION_SITES
from parity_audit.core.types import SiteTap
from parity_audit.core.wire import NATIVE, RunRequest
from parity_audit.invariance.conditions import Condition
from parity_audit.specs.view import taps

TENSOR = "x"
CACHED_TOKENS = "cached_prompt_tokens"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The captured values of the subject in one run: sites `[pos, ...]` at its own tokens.

    `facts` are the program's own counters. `start` is the first position that this run computed; positions before it came
    from a cache and hold no captured values. `gap` says why nothing was captured. `non_finite` names sites with NaN or
    infinite values.
    """

    values: Mapping[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    start: int = 0
    gap: str = ""
    non_finite: tuple[str, ...] = ()


def visible(session: Session) -> tuple[SiteTap, ...]:
    """Return the taps whose values are compared, with shape `[batch, pos, ...]`.

    Attention matrices are left out, because they have another shape in every decode step. Taps that rest on an assumption
    about the port's code are left out, because comparing them would test the assumption.
    """
    about, plan = session.description(), session.plan
    every = taps(plan.spec, plan.backend_key, plan.config, about.release)
    return tuple(tap for tap in every if not tap.assumes and not tap.site.endswith(ATTENTION_SITES))


def observe(
    session: Session, condition: Condition, out: Path, *, precision: str = NATIVE, keep_cache: bool = False
) -> Seen:
    """Run one condition, and return the captured values of the subject.

    If the backend raises an error, the returned value holds a gap instead, and other conditions can still be run.

    Raises:
        WorkerDied: the process is gone.
    """
    request = RunRequest(
        probe=condition.probe, taps=visible(session), out=str(out), precision=precision, cached=condition.cached,
        returned=True, rows=(condition.row,), chunk=condition.chunk, threads=condition.threads, keep_cache=keep_cache,
    )  # fmt: skip
    try:
        reply = session.run(request)
    except BackendFailed as error:
        return Seen(gap=error.message)
    finally:
        files = out / condition.probe.name
    if not reply.entries:
        return Seen(gap="; ".join(gap.why for gap in reply.not_tested) or "the run showed no site", facts=reply.facts)
    mask = torch.tensor(condition.probe.mask[condition.row], dtype=torch.bool)
    read = {entry.site: _subject(out, entry, mask) for entry in reply.entries}
    shutil.rmtree(files, ignore_errors=True)
    values = {site: value for site, value in read.items() if value is not None}
    start = int(reply.facts.get(CACHED_TOKENS) or 0)
    bad = tuple(site for site, value in values.items() if not bool(value[start:].isfinite().all()))
    return Seen(values=values, facts=reply.facts, start=start, non_finite=bad)


def _subject(out: Path, entry: Entry, mask: Tensor) -> Tensor | None:
    """Return a site's values at the subject's own tokens (no padding); None if the site has no axis of positions."""
    value = load_file(out / entry.file)[TENSOR]
    return value[0][mask] if value.ndim >= 3 and value.shape[1] == len(mask) else None


def renamed(condition: Condition, name: str) -> Condition:
    """Return the same condition under another name for its files."""
    return dataclasses.replace(condition, probe=dataclasses.replace(condition.probe, name=name))
