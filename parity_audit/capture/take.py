"""Take captures: run every probe through a session and store the captured tensors, with their provenance, on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parity_audit.cache.aside import set_aside
from parity_audit.capture.centred import centred_entries
from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.sizes import FLOAT64_BYTES, STORED_BYTES, numbers_of
from parity_audit.capture.store import RESULTS_ONLY, Capture, open_capture, write_manifest
from parity_audit.core.errors import CaptureBroken
from parity_audit.core.jsonio import dumps
from parity_audit.core.manifest import Entry, Manifest
from parity_audit.core.progress import CAPTURE, REUSE
from parity_audit.core.shards import RankShare
from parity_audit.core.sites import ATTENTION_SITES, ENTERS_BLOCK, LEAVES_BLOCK, LOGITS, local_name
from parity_audit.core.types import Checkpoint, NotTested, NotVisible, Probe, SiteTap
from parity_audit.core.wire import NATIVE, RunRequest
from parity_audit.specs.view import dims, not_visible, taps

RESIDUAL_SITES = (
    *ENTERS_BLOCK, "altup.active", "resid_mid", *LEAVES_BLOCK, "attn_out", "laurel.out", "mlp_out", "per_layer.out",
    "mlp.router_logits", "mlp.router_weights",
)  # fmt: skip
"""The residual stream, what is added to it, and the router that chooses experts: if the choice is nearly tied, rounding decides
it, and all later values follow from it."""
OF_A_PROBE = re.compile(r"(.*) \(probe ([\w-]+)\)")
"""The text of a gap that concerns a single probe: what was not tested, and the probe's name."""
Files = Mapping[str, Mapping[str, str]]
"""Tensor files by probe and site."""


def wanted(tap: SiteTap, probe: Probe) -> bool:
    """Whether a probe captures a site: some probes capture all sites, the others only the residual stream and the outputs."""
    return probe.sites == "all" or not tap.site.startswith("blocks.") or tap.site.endswith(RESIDUAL_SITES)


def whole_in_steps(tap: SiteTap, probe: Probe) -> bool:
    """Whether a site of a decoded probe can be joined from its decode steps: attention matrices cannot, as they grow per step."""
    return probe.decode_from is None or not tap.site.endswith(ATTENTION_SITES)


def take_capture(
    session: Session,
    probes: Sequence[Probe],
    out: Path,
    *,
    precision: str = NATIVE,
    with_weights: bool = False,
    forced_by: Capture | None = None,
    force: Callable[[str, str], bool] = lambda probe, site: True,
    imposed: Files | None = None,
    choose: Callable[[SiteTap, Probe], bool] = wanted,
) -> Capture:
    """Run the probes and return the capture.

    `forced_by`: replay instead of run, and give the model that capture's tensors at the sites for which `force(probe, site)` is
    true; this shows the error that each component introduces. `imposed`: tensor files that replace what the model computes at
    sites; entries that are NaN keep the model's own value.

    Raises:
        NotJudged: the backend failed; probes that finished before stay on disk.
    """
    description = session.description()
    plan = session.plan
    known = taps(plan.spec, plan.backend_key, plan.config, description.release)
    every_tap = [tap for tap in known if local_name(tap.site) not in plan.left_out]
    entries: list[Entry] = []
    promised = not_visible(plan.spec, plan.backend_key, plan.config, description.release)
    hidden: dict[str, Sequence[NotVisible]] = {}
    gaps: list[NotTested] = []
    raised: dict[str, str] = {}
    ran: list[Probe] = []
    shares: list[RankShare] = []
    seconds: dict[str, float] = {}
    for number, probe in enumerate(probes):
        session.progress.update(CAPTURE, f"{session.label}: {probe.name}", number, len(probes))
        own = (imposed or {}).get(probe.name, {})
        chosen = tuple(
            tap for tap in every_tap if tap.site in own or (choose(tap, probe) and whole_in_steps(tap, probe))
        )
        cached = session.decodes and probe.decode_from is not None and precision == NATIVE and forced_by is None
        request = RunRequest(
            probe=probe, taps=chosen, out=str(out), precision=precision, inputs=_inputs(forced_by, probe, chosen, force),
            imposed=dict(own), cached=cached, returned=forced_by is None,
        )  # fmt: skip
        if session.scratch is not None:
            session.scratch.require(_bytes(request, plan), f"a run of {session.label} on probe {probe.name}")
        started = time.perf_counter()
        reply = session.run(request) if forced_by is None else session.replay(request)
        ran.append(probe.columns(0, reply.positions).as_captured())
        seconds[probe.name] = time.perf_counter() - started
        entries += centred_entries(reply.entries, plan.centred, out)
        hidden[probe.name] = reply.not_visible
        gaps += reply.not_tested
        raised |= {probe.name: reply.raised} if reply.raised else {}
        shares += reply.shares
    shown = {entry.site for entry in entries}
    never = {item.site: item for items in (promised, *hidden.values()) for item in items if item.site not in shown}
    for name, items in hidden.items():
        lost = [item for item in items if item.site in shown]
        gaps += [hidden_there(name, lost)] if lost else []
    manifest = Manifest(
        backend=session.label, dtype=plan.dtype if precision == NATIVE else precision, device=plan.device,
        checkpoint=_lasting(plan.checkpoint), precision=precision, architecture=plan.spec.architecture,
        spec=Path(plan.spec.file).name, description=description, probes=tuple(ran), entries=tuple(entries),
        not_visible=tuple(never.values()), not_tested=tuple(of_several_probes(gaps)), raised=raised,
        weights=session.weights() if with_weights else (), seconds=seconds, shares=tuple(shares),
    )  # fmt: skip
    write_manifest(out, manifest)
    return open_capture(out, just_written=True)


def of_several_probes(gaps: Sequence[NotTested]) -> list[NotTested]:
    """Merge the gaps that differ only in the probe."""
    found: dict[tuple[str, str], list[str]] = {}
    for gap in gaps:
        own = OF_A_PROBE.fullmatch(gap.what)
        what, name = (gap.what, "") if own is None else own.groups()
        found.setdefault((what, gap.why), []).append(name)
    return [NotTested(what=what + _of_probes(names), why=why) for (what, why), names in found.items()]


def _of_probes(names: Sequence[str]) -> str:
    if not any(names):
        return ""
    return f" (probe{'s' if len(names) > 1 else ''} {', '.join(names)})"


def hidden_there(probe: str, items: Sequence[NotVisible]) -> NotTested:
    """Return one gap for the sites that this probe does not show although other probes do."""
    sites = f"{items[0].site}" if len(items) == 1 else f"{len(items)} sites, {items[0].site} the first"
    return NotTested(what=f"probe {probe}: {sites}", why=items[0].why)


def _bytes(request: RunRequest, plan: SidePlan) -> int:
    """Return the most bytes that a run writes; returned logits are counted in addition to those that a hook shows."""
    returned = tuple(tap for tap in request.taps if request.returned and tap.site == LOGITS)
    each, taps = STORED_BYTES if request.precision == NATIVE else FLOAT64_BYTES, (*request.taps, *returned)
    sizes, twice = dims(plan.spec, plan.config), [tap for tap in taps if local_name(tap.site) in plan.centred]
    return each * numbers_of(request.probe, taps, sizes) + FLOAT64_BYTES * numbers_of(request.probe, twice, sizes)


def _lasting(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as a manifest names it: a synthetic one without the paths of this audit's copy.

    A synthetic checkpoint is identified by its fingerprint.
    """
    return checkpoint if checkpoint.synthetic is None else dataclasses.replace(checkpoint, path="", hf_home=None)


def _inputs(
    forced_by: Capture | None, probe: Probe, chosen: Sequence[SiteTap], force: Callable[[str, str], bool]
) -> dict[str, str]:
    if forced_by is None:
        return {}
    held = forced_by.sites(probe.name)
    return {
        tap.site: str(forced_by.file(probe.name, tap.site))
        for tap in chosen
        if tap.site in held and force(probe.name, tap.site)
    }


def reusable_capture(
    session: Session, probes: Sequence[Probe], root: Path, *, precision: str = NATIVE, with_weights: bool = False
) -> Capture:
    """Open the capture that an unfinished audit left below `root`, or take a new one there.

    An existing capture's files are read once and compared with their hashes. A capture whose tensors were deleted is taken
    again; so is a damaged one, which is moved aside with a message.
    """
    session.description()
    folder = root / plan_key(session, probes, precision)
    if (folder / RESULTS_ONLY).exists():
        shutil.rmtree(folder)
    if folder.exists():
        try:
            taken = open_capture(folder)
            taken.verify()
            session.progress.update(
                REUSE, f"{session.label} in {taken.manifest.dtype}, captured by an audit that did not finish"
            )
            return taken
        except CaptureBroken as error:
            set_aside(folder, what="capture", why=error.message, then="taken again")
    return take_capture(session, probes, folder, precision=precision, with_weights=with_weights)


def plan_key(session: Session, probes: Sequence[Probe], precision: str = NATIVE) -> str:
    """Return a hash of everything that determines a capture's numbers: equal keys mean equal captures."""
    plan = session.plan
    parts = {
        "checkpoint": plan.checkpoint.fingerprint,
        "environment": plan.environment.key,
        "version": plan.environment.version,
        "weights": _lasting(plan.checkpoint).path,
        "settings": [plan.ref.settings, session.load_settings, session.edits],
        "run": [plan.dtype, plan.device, precision, session.decodes],
        "probes": list(probes),
        "spec": plan.spec.fingerprint,
        "sites": [sorted(plan.left_out), sorted(plan.centred)],
    }
    return hashlib.sha256(dumps(parts).encode()).hexdigest()[:16]
