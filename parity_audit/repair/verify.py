"""Verify patches: apply them, read the settings back, run and judge again. Only a patch that was measured to work is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.capture.take import take_capture
from parity_audit.compare.choices import Pair
from parity_audit.compare.deltas import Comparison, compare
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.errors import BackendFailed
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Patch, Patched, Verdict
from parity_audit.core.types import EVERY, MAY_BE_MISSING, NotTested, Probe, ReadBack
from parity_audit.diagnose.routing import follow
from parity_audit.repair.choose import Proposal, all_edits, no_patch
from parity_audit.repair.render import render

NO_PLACE = "NoSuchPath"
"""The name of the worker's error if the loaded model lacks the path of an edit."""


@dataclass(frozen=True, kw_only=True)
class PatchJudge:
    """The captures against which a patched candidate is judged. `judging`: the session that ran both, if one session did."""

    reference: Capture
    judge: Capture | None
    probes: tuple[Probe, ...]
    dtype: str
    target: float
    definition: Capture | None = None
    judging: Session | None = None

    def compared(self, capture: Capture, probes: Sequence[Probe] | None = None) -> Comparison:
        """Compare a run of the patched candidate with the reference and the judge, over all probes or some."""
        reference, judge = self.reference, self.judge
        if judge is not None and self.judging is not None:
            out = capture.folder.with_name(f"{capture.folder.name}-choices")
            pair = Pair(judge=judge, floor=reference)
            followed = follow(self.judging, pair, capture, self.probes if probes is None else probes, out).pair
            reference, judge = followed.floor, followed.judge
        reference = reference if probes is None else reference.only(probes)
        return compare(capture, reference, judge, dtype=self.dtype, definition=self.definition)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A patched run: its capture, its comparison, and the results for the report."""

    capture: Capture
    comparison: Comparison
    patched: Patched
    patches: tuple[Patch, ...]

    @property
    def knobs(self) -> set[str]:
        """The knobs that were patched."""
        return {patch.knob for patch in self.patches}


def run_patched(session: Session, proposals: Sequence[Proposal], bench: PatchJudge, out: Path) -> Verified:
    """Apply the proposals together, run every probe, and compare with the same reference and judge as before."""
    read_back = session.apply(all_edits(proposals))
    capture = take_capture(session, bench.probes, out)
    comparison = bench.compared(capture)
    verdict, _ = judge_comparison(comparison)
    patched = Patched(
        verdict=verdict, logits=comparison.logits, sites=comparison.sites, target=bench.target,
        target_reached=comparison.logits is not None and comparison.logits.max_abs <= bench.target,
    )  # fmt: skip
    patches = tuple(_patch(proposal, session, read_back) for proposal in proposals)
    return Verified(capture=capture, comparison=comparison, patched=patched, patches=patches)


def with_live_setting(session: Session, proposals: Sequence[Proposal]) -> tuple[list[Proposal], list[NotTested]]:
    """Return the proposals whose settings exist in the loaded model, and the others with the reason.

    The edits of the returned proposals are in force afterwards.
    """
    try:
        session.apply(all_edits(proposals))
        return list(proposals), []
    except BackendFailed as error:
        if NO_PLACE not in str(error):
            raise
    there, gaps = [], []
    for proposal in proposals:
        try:
            session.apply(proposal.edits)
            there.append(proposal)
        except BackendFailed as error:
            place = str(error).partition(f"{NO_PLACE}: ")[2].partition("\n")[0]
            gaps.append(no_patch(proposal.knob, f"this model has no place for its setting: {place}"))
    session.apply(all_edits(there))
    return there, gaps


def needed(session: Session, proposals: Sequence[Proposal], bench: PatchJudge, out: Path) -> list[Proposal]:
    """Return the smallest set of proposals: drop each one without which every probe still passes.

    Proposals with the same edits (a rotary table takes base and scaling together) are kept or dropped together. At least one
    is kept. Probes that capture every site run first: most needed proposals are recognised there, and long probes cost more.
    """
    kept = list(proposals)
    for number, edits in enumerate({dumps(proposal.edits): proposal.edits for proposal in proposals}.values()):
        rest = [other for other in kept if other.edits != edits]
        if not rest:
            break
        session.apply(all_edits(rest))
        if not _missed(session, bench, out / f"without-{number}"):
            kept = rest
    return kept


def _missed(session: Session, bench: PatchJudge, out: Path) -> bool:
    """Whether the session as it is now departs from the reference on some probe; probes with every site run first."""
    for name in ("all", "residual"):
        probes = tuple(probe for probe in bench.probes if probe.sites == name)
        if not probes:
            continue
        capture = take_capture(session, probes, out / name)
        if departs(bench.compared(capture, probes)):
            return True
    return False


def moves_outputs(session: Session, proposals: Sequence[Proposal], knob: str, patched: Capture, out: Path) -> bool:
    """Whether one knob's patch changes any bit of any site of the first probe; all patches are in force afterwards."""
    session.apply(all_edits([proposal for proposal in proposals if proposal.knob != knob]))
    without = take_capture(session, patched.probes[:1], out)
    session.apply(all_edits(proposals))
    return any(entry.sha256 != patched.entries[place].sha256 for place, entry in without.entries.items())


def departs(comparison: Comparison) -> bool:
    """Whether a comparison's verdict is neither parity nor exact."""
    verdict, _ = judge_comparison(comparison)
    return verdict not in (Verdict.PARITY, Verdict.EXACT)


def _patch(proposal: Proposal, session: Session, read_back: Sequence[ReadBack]) -> Patch:
    mine = tuple(item for item in read_back if any(_covers(edit.path, item.path) for edit in proposal.edits))
    return Patch(
        knob=proposal.knob, backend=proposal.backend, value=proposal.value, edits=proposal.edits,
        code=render(proposal.edits, session.plan.backend_key, session.description().text_paths),
        fixes=(proposal.knob,), note=proposal.note, read_back=mine,
    )  # fmt: skip


def _covers(pattern: str, path: str) -> bool:
    """Whether an edit's path, with markers for every layer and for parts that may be missing, matches a concrete path."""
    head, star, tail = pattern.replace(MAY_BE_MISSING, "").partition(EVERY)
    return path == head or (bool(star) and path.startswith(head + "[") and tail in path)


def changes_nothing(patch: Patch) -> bool:
    """Whether every setting had the patch's value before; False if a setting was not read back, because it may have changed."""
    loads = any(edit.op == "load" for edit in patch.edits)
    return bool(patch.read_back) and not loads and not any(item.changed for item in patch.read_back)


def merge_fixes(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Merge patches with identical edits into one patch that fixes several findings."""
    merged: list[Patch] = []
    for patch in patches:
        twin = next((number for number, other in enumerate(merged) if other.edits == patch.edits), None)
        if twin is None:
            merged.append(patch)
        else:
            both = (*merged[twin].fixes, *patch.fixes)
            merged[twin] = dataclasses.replace(merged[twin], fixes=tuple(dict.fromkeys(both)))
    return tuple(merged)
