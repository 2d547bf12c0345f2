"""The judge's captures of a spec's miniature together with the spec's formulas, taken once for any number of comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from parity_audit.cache.root import cache_root
from parity_audit.capture.bounded import WHOLE
from parity_audit.capture.plan import AuditPlan, plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture, wanted
from parity_audit.core.progress import Progress
from parity_audit.core.sites import RETURNED, site_order
from parity_audit.core.types import BackendRef, Probe, SiteTap
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.fit.residuals import Component, Residuals
from parity_audit.formulas.decoder import decoder_of
from parity_audit.formulas.stored import CheckpointTensors
from parity_audit.specs.facts import decoder_facts
from parity_audit.specs.schema import Spec

PROBES = ("left_padded", "long")
"""The probes of the check: a padded batch with all sites, and a text longer than the window and the original context of models that
have them."""
LONG_SITES = ("resid_pre", "attn_out")


@contextmanager
def judged_components(spec: Spec, seed: int, progress: Progress) -> Iterator[tuple[Residuals, list[Component]]]:
    """Yield the residuals of the spec's formulas on the miniature of its first model, and every captured component.

    Raises:
        NotJudged: transformers does not run the miniature.
    """
    model = spec.first_model
    with TemporaryDirectory() as folder:
        plan = plan_audit(
            model,
            synthetic="mini",
            seed=seed,
            weights=None,
            probes=None,
            dtype="float32",
            device="cpu",
            cache=cache_root(),
            disk=WHOLE,
        )
        probes = tuple(probe for probe in plan.probes if probe.name in PROBES)
        taken = _taken(plan, probes, Path(folder), progress)
        facts = decoder_facts(spec, plan.config)

        @lru_cache
        def captured(probe: str, site: str) -> Tensor | None:
            return taken.tensor(probe, site) if site in taken.sites(probe) else None

        stored = CheckpointTensors(Path(plan.checkpoint.path))
        residuals = Residuals(decoder=decoder_of(facts, stored, torch.float64), captured=captured)
        yield residuals, _components(residuals, taken)


def _taken(plan: AuditPlan, probes: tuple[Probe, ...], folder: Path, progress: Progress) -> Capture:
    side = side_plan(plan, BackendRef(name="hf"), install=False, progress=progress)
    session = Session(plan=side, log=folder / "judge.log", progress=progress)
    try:
        return take_capture(session, probes, folder / "judge", precision=FLOAT64, choose=_chosen)
    finally:
        session.release()


def _chosen(tap: SiteTap, probe: Probe) -> bool:
    """Whether a site is captured: of a long text only what the check of attention needs, the input of a block and `attn_out`."""
    return wanted(tap, probe) and (probe.sites == "all" or tap.site.endswith(LONG_SITES))


def _components(residuals: Residuals, taken: Capture) -> list[Component]:
    """Return a component for every captured site that is checked, with the knobs that its formula asks for.

    Of a long text, only the output of attention is checked.
    """
    found = []
    for probe in taken.probes:
        sites = (site for site in taken.sites(probe.name) if site != RETURNED)
        if probe.sites != "all":
            sites = (site for site in sites if site.endswith("attn_out"))
        for site in sorted(sites, key=site_order):
            bare = Component(probe=probe, site=site)
            found.append(Component(probe=probe, site=site, knobs=residuals.asked(bare, residuals.decoder.values)))
    return found
