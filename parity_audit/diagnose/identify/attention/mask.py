"""Does every query see what it should: itself and all before it, and nothing else?

Read from the scores, where finite means visible. In real tokens (padding cut away) a correct mask is
causal without holes: key j is visible to query i exactly when i - W < j <= i for one W (`window`).
Padding keys must be hidden from every real query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap, real
from parity_audit.diagnose.identify.attention.rows import seen

KNOB = "attention.mask"
CAUSAL = "causal"
FUTURE, AHEAD = "not causal", "sees one key ahead"


def mask_from_scores(evidence: Evidence) -> Outcome:
    """The mask in words: "causal", or what is wrong with it."""
    faults: set[str] = set()
    queries = 0
    for probe in evidence.short_probes():
        scores = evidence.tensor(probe.name, "attn_scores")
        if scores is None:
            continue
        for own, mask in zip(scores, real(probe), strict=True):
            faults |= faults_of(seen(own).any(0), mask)
            queries += int(mask.sum())
    if queries == 0:
        return gap(evidence, KNOB, "the scores are not visible")
    if any(fault.startswith(("a prefix", AHEAD)) for fault in faults):
        faults.discard(FUTURE)  # said by rows that are too short to tell
    value = ", ".join(sorted(faults)) if faults else CAUSAL
    return KnobFit(
        knob=KNOB, layer=evidence.layer, value=value, stderr=None, residual=0.0, n=queries, site="attn_scores"
    )  # fmt: skip


def faults_of(visible: Tensor, mask: Tensor) -> set[str]:
    """What is wrong with `visible[query key]` of one row, given which tokens are real."""
    faults: set[str] = set()
    kept = mask.nonzero()[:, 0]
    if bool(visible[kept][:, ~mask].any()):
        faults.add("sees padding")
    own = visible[kept][:, kept]
    if bool(own.triu(1).any()):
        faults.add(_future(own))
    if not bool(own.diagonal().all()):
        faults.add("hides the query's own key")
    first = own.to(torch.int8).argmax(-1)
    faults |= _start(first)
    expected = (torch.arange(len(kept))[None] >= first[:, None]).tril()
    # A query's own key is said above.
    if bool((expected & ~own).tril(-1).any()):
        faults.add("hides keys inside the window")
    return faults


def _start(first: Tensor) -> set[str]:
    """What is wrong with the first key that each query sees, in a causal mask: a window slides, or starts at 0."""
    at = torch.arange(len(first))
    window = int((at - first).max()) + 1
    if bool((first == (at - window + 1).clamp(min=0)).all()):
        return set()
    step = int((first > 0).to(torch.int8).argmax())
    if step > 1 and bool((first == at // step * step).all()):
        return {f"sees its own chunk of {step} tokens only"}
    hidden = int(first.max())
    if hidden < len(first) - 1 and bool((first[hidden:] == hidden).all()):
        return {f"hides the first {hidden} tokens from the others"}
    return {"hides earlier keys unevenly"}


def _future(own: Tensor) -> str:
    """Which later keys are seen: the next one only, those of a prefix, or others."""
    later, size = own.triu(1), own.shape[0]
    if size > 2 and not bool(own.triu(2).any()) and bool(own.diagonal(1).all()):
        return AHEAD
    prefix = int(later.any(0).nonzero().max()) + 1
    within = bool(own[:prefix, :prefix].all()) and not bool(later[:, prefix:].any())
    return f"a prefix of {prefix} tokens sees itself whole" if within and prefix < size else FUTURE
