"""Compare the value that a model returns with its logits hook: if they differ, find which of them is right, and how.

Nothing after the last hook can be replayed, so the returned value is compared with the hooked one of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parity_audit.compare.deltas import Comparison
from parity_audit.compare.floor import dtype_eps
from parity_audit.compare.outputs import OUTPUTS
from parity_audit.compare.shapes import Misfit
from parity_audit.compare.source import TensorSource
from parity_audit.core.limits import share_of_limit
from parity_audit.core.report import Finding
from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.core.types import Probe
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.diagnose.evidence import real
from parity_audit.diagnose.thresholds import FEW_ROUNDINGS

KNOB, SHAPE, WIDTH = "logits.returned", "logits.shape", "logits.vocabulary"
COARSE = (torch.bfloat16, torch.float16)
NO_PATCH = {
    KNOB: "it is made behind the last hook, where no setting is known",
    SHAPE: "no setting is known for it: return the logits of every position of every row",
    WIDTH: "no setting is known for it: cut what is beyond the vocabulary, or give it -inf",
}


def returned_findings(capture: TensorSource, comparison: Comparison, dtype: str) -> tuple[list[Finding], list[str]]:
    """Findings about the returned value, where its error is not already in the hooks, and warnings about a misleading
    logits hook."""
    findings = [] if comparison.misshapen_output is None else [_of_shape(comparison.misshapen_output)]
    apart = list(_apart(capture, dtype))
    if not apart:
        return findings, []
    wrong = {
        site for site in OUTPUTS for delta in comparison.by_probe if delta.site == site and share_of_limit(delta) > 1
    }
    names = ", ".join(probe.name for probe, _, _ in apart)
    far = max(float((hooked - value).abs().max()) for _, hooked, value in apart)
    if RETURNED not in wrong and LOGITS in wrong:
        return findings, [
            f"the logits hook shows other values than the model returns (up to {far:.3g} apart, probes {names}); "
            "what it returns agrees with the reference"
        ]
    if RETURNED not in wrong:
        return findings, []
    said = changed_by([hooked for _, hooked, _ in apart], [value for _, _, value in apart], dtype)
    right = "the reference's logits" if LOGITS not in wrong else "other logits, which are not the reference's either"
    message = f"the hook shows {right}, the model returns others: {said}"
    return [*findings, _finding(message, said, far, names)], []


def _finding(message: str, said: str, far: float, probes: str) -> Finding:
    return Finding(
        knob=KNOB, kind="variant", layers=None, site=RETURNED, reference_value="as hooked", candidate_value=said,
        spec_value="as hooked", evidence={"largest_difference_to_hook": far, "probes": probes}, confidence=BY_COMPARISON,
        departs_from_spec="candidate", message=message,
    )  # fmt: skip


def _of_shape(misfit: Misfit) -> Finding:
    """The finding that the returned logits have another vocabulary size, or another shape altogether."""
    width = misfit.only_vocabulary
    expected, found = (misfit.expected[-1], misfit.found[-1]) if width else (list(misfit.expected), list(misfit.found))
    return Finding(
        knob=WIDTH if width else SHAPE, kind="variant", layers=None, site=misfit.site, reference_value=expected,
        candidate_value=found, spec_value=expected, confidence=BY_COMPARISON, departs_from_spec="candidate",
        evidence={"probe": misfit.probe, "largest_probability_beyond": misfit.beyond}, message=misfit.words,
    )  # fmt: skip


def _apart(capture: TensorSource, dtype: str) -> Iterator[tuple[Probe, Tensor, Tensor]]:
    """Yield the probes on which the returned and the hooked logits differ, with both, `[token d_vocab]` at the real
    tokens."""
    for probe in capture.probes:
        if not capture.sites(probe.name).issuperset(OUTPUTS):
            continue
        if capture.digest(probe.name, LOGITS) == capture.digest(probe.name, RETURNED):
            continue
        if capture.shape(probe.name, LOGITS) != capture.shape(probe.name, RETURNED):
            continue
        hooked, value = (capture.rows(probe.name, site, 0, probe.shape[1])[real(probe)].double() for site in OUTPUTS)
        if _far(hooked, value, dtype):
            yield probe, hooked, value


def _far(a: Tensor, b: Tensor, dtype: str) -> bool:
    """Whether two tensors differ by more than rounding."""
    return bool((a - b).abs().max() > FEW_ROUNDINGS * dtype_eps(dtype) * a.abs().max())


def changed_by(hooked: list[Tensor], returned: list[Tensor], dtype: str) -> str:
    """Describe in words how the returned logits `[token d_vocab]` follow from the hooked ones."""
    x, y = torch.cat(hooked), torch.cat(returned)
    low, high = float(y.min()), float(y.max())
    if not _far(x.clamp(low, high), y, dtype):
        return f"clipped to {low:.6g} ... {high:.6g}"
    for coarse in COARSE:
        if dtype_eps(dtype) < torch.finfo(coarse).eps and torch.equal(x.to(coarse).double(), y):
            return f"rounded to {str(coarse).removeprefix('torch.')}"
    factor = float((x * y).sum() / x.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
    if not _far(factor * x, y, dtype):
        return f"multiplied by {factor:.6g}"
    shift = (y - x).mean(-1, keepdim=True)
    if not _far(x + shift, y, dtype):
        return f"shifted by a constant per token, {float(shift.mean()):.4g} on average"
    wrong = (x - y).abs().amax(-1) > FEW_ROUNDINGS * dtype_eps(dtype) * x.abs().max()
    return f"{int(wrong.sum())} of {len(wrong)} tokens differ, by up to {float((x - y).abs().max()):.3g}"
