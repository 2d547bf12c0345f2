"""Check a candidate's hooks: the outputs may agree while a hook shows another tensor, or an edit at a hook has no effect."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from parity_audit.audit.reference import Reference
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.checks.by_name import WHAT, NamedHooks, Sides, findings, named_hooks, sites_of_wrong_hooks
from parity_audit.checks.edits import EditedSides, hook_edits
from parity_audit.compare.deltas import Comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.limits import share_of_limit
from parity_audit.core.report import Candidate, Verdict
from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.core.types import NotTested
from parity_audit.specs.hook_names import WITH_HOOKS

EDITS = "hook edits"
OUTPUTS = ("resid_pre", "resid_post", "ln_final.out", LOGITS, RETURNED)
AGREE = (Verdict.PARITY, Verdict.EXACT)


def read_by_name(session: Session, capture: Capture, reference: Reference, out: Path) -> NamedHooks:
    """Read every hook of the candidate, as it is now, under its own name.

    If the hooks cannot be read, the reason is reported as a gap, because the outputs are judged in any case.
    """
    if session.plan.backend_key not in WITH_HOOKS:
        return NamedHooks(hooks=(), says={}, not_tested=())
    if reference.judge is None or session.description().processing:
        return not_read("they need a float64 judge and weights that are not processed")
    sides = Sides(
        candidate=session, shown=capture, reference=reference.capture, judge=reference.judge,
        definition=reference.definition, dtype=reference.dtype, out=out,
    )  # fmt: skip
    try:
        return named_hooks(sides)
    except NotJudged as error:
        return not_read(f"the run with every hook set failed: {error.message}")
    finally:
        shutil.rmtree(out, ignore_errors=True)


def not_read(why: str) -> NamedHooks:
    """Return a result without hooks, with the reason why they were not read."""
    return NamedHooks(hooks=(), says={}, not_tested=(NotTested(what=WHAT, why=why),))


def only_hooks(comparison: Comparison, named: NamedHooks) -> bool:
    """Return whether the hooks explain all differences of a comparison.

    This is so if something differs, every site that differs is shown by a hook that is known to be wrong, the outputs and
    the residual stream agree, and all numbers are finite.
    """
    wrong = {delta.site for delta in comparison.deciding if share_of_limit(delta) > 1.0}
    wrong |= {place.partition("/")[2] for place in comparison.mask_mismatch}
    outputs = any(site.endswith(OUTPUTS) for site in wrong)
    return bool(wrong) and not outputs and not comparison.non_finite and wrong <= sites_of_wrong_hooks(named)


def with_names(result: Candidate, named: NamedHooks, *, agree: bool) -> Candidate:
    """Return the result with the difference at every hook, and a finding for every hook that shows another tensor.

    Such a finding turns parity of the outputs (`agree`) into a mismatch: a port whose hooks show other tensors than their
    names say is not a correct port, even if its outputs agree.
    """
    wrong = findings(named, outputs_agree=agree)
    result = dataclasses.replace(
        result, hooks=tuple(item.delta for item in named.hooks), findings=(*result.findings, *wrong),
        not_tested=(*result.not_tested, *named.not_tested),
    )  # fmt: skip
    if not wrong or not agree:
        return result
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return dataclasses.replace(result, verdict=Verdict.MISMATCH, why=f"outputs agree, but {wrong[0].message}{more}")


def with_edits(
    result: Candidate, named: NamedHooks, session: Session, capture: Capture, reference: Reference, out: Path, *,
    agree: bool,
) -> Candidate:  # fmt: skip
    """Return the result with the effect of editing each hook, compared with the same edit in the reference.

    If a patch brought the port to parity, the patched port is edited, otherwise the port as shipped. If the outputs of the
    edited port do not agree with the reference, only an edit without any effect can be recognised.
    """
    if reference.judge is None or session.description().processing:
        return _gap(result, "they need a float64 judge and weights that are not processed")
    if result.verdict not in (*AGREE, Verdict.MISMATCH):
        return _gap(result, "the outputs could not be judged")
    mended = result.patched is not None and result.patched.verdict in AGREE
    try:
        session.apply(tuple(edit for patch in result.patches for edit in patch.edits) if mended else ())
        sides = EditedSides(
            candidate=session, judging=reference.judging, judge=reference.judge, shown=capture, named=named,
            dtype=reference.dtype, out=out, agrees=agree or mended,
        )  # fmt: skip
        edits, gaps = hook_edits(sides)
    except NotJudged as error:
        return _gap(result, f"a run with a hook edited failed: {error.message}")
    result = dataclasses.replace(result, hook_edits=tuple(edits), not_tested=(*result.not_tested, *gaps))
    wrong = [edit for edit in edits if not edit.same]
    if not wrong or result.verdict not in AGREE:
        return result
    why = f"outputs agree, but editing {wrong[0].site} does not do what it does in the reference: {wrong[0].says}"
    return dataclasses.replace(result, verdict=Verdict.MISMATCH, why=why)


def _gap(result: Candidate, why: str) -> Candidate:
    return dataclasses.replace(result, not_tested=(*result.not_tested, NotTested(what=EDITS, why=why)))
