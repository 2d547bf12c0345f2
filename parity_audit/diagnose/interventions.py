"""Does editing a hook do what the same edit does in the reference?

A forward pass can be bit-identical and an edit still be lost: a hook may show a copy, or feed one of the two places
that use a tensor. So one site at a time, in one middle block, is replaced by the same edited tensor on every side:

    edited = the judge's tensor, with its last axis reversed at every second position (scores and pattern: times 1.5)

and the logits are compared as always: RMSE(candidate, judge) over the floor RMSE(reference, judge), all of them edited.
`resid_mid` is what attention leaves for the norm *and* for the next sum. transformers has no place that is both: there the
edit is made on attn_out, attn_out + (edited - resid_mid), and a candidate of transformers is not asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.compare.floor import noise_ratio
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import limit_of
from parity_audit.core.report import HookEdit
from parity_audit.core.sites import ATTENTION_SITES, LOGITS, layer_of, local_name, site_order
from parity_audit.core.types import NotTested, Probe
from parity_audit.core.wire import FLOAT64, NATIVE, RunRequest
from parity_audit.diagnose.evidence import f64, real
from parity_audit.diagnose.limits import chosen_probe
from parity_audit.specs.view import taps

NOT_EDITED = (LOGITS, "mlp.router_logits", "mlp.router_weights")
EXCITED = 100.0
"""Floors that an edit has to move the judge's logits by."""
MATRIX_TIMES = 1.5
MID = "resid_mid"
READ_ONLY = ("vllm",)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Who is edited: the candidate, and the judging session twice, natively (the floor) and in float64."""

    candidate: Session
    judging: Session
    judge: Capture
    shown: Capture
    dtype: str
    out: Path


def hook_edits(sides: Sides) -> tuple[list[HookEdit], list[NotTested]]:
    """Every site of one middle block that both sides show, edited; and those where nothing could be learnt.

    Raises:
        NotJudged: a backend failed.
    """
    if sides.candidate.plan.backend_key in READ_ONLY:
        return [], [NotTested(what="hook edits", why=f"{sides.candidate.label} can be read here, not edited")]
    probe = chosen_probe(sides.judge.probes)
    try:
        plain = _Logits(sides, probe, {}, {})
        found = [_edited(sides, probe, plain, site) for site in _sites(sides, probe)]
    finally:
        shutil.rmtree(sides.out, ignore_errors=True)
    edits = [item for item in found if isinstance(item, HookEdit)]
    return edits, [item for item in found if isinstance(item, NotTested)]


def _sites(sides: Sides, probe: Probe) -> Iterator[str]:
    shared = sides.judge.sites(probe.name) & sides.shown.sites(probe.name)
    middle = max((layer for site in shared if (layer := layer_of(site)) is not None), default=0) // 2
    for site in sorted(shared, key=site_order):
        here = layer_of(site) in (None, middle)
        nowhere = local_name(site) == MID and sides.candidate.plan.backend_key == "hf"
        if here and not nowhere and local_name(site) not in NOT_EDITED:
            yield site


class _Logits:
    """Logits of the real tokens with sites replaced: the candidate's, the reference's and the judge's."""

    def __init__(
        self, sides: Sides, probe: Probe, on_candidate: Mapping[str, Tensor], on_judge: Mapping[str, Tensor]
    ) -> None:
        self.candidate = _run(sides, sides.candidate, probe, on_candidate, NATIVE)
        self.reference = _run(sides, sides.judging, probe, on_judge, NATIVE)
        self.judge = _run(sides, sides.judging, probe, on_judge, FLOAT64)


def _run(sides: Sides, session: Session, probe: Probe, replaced: Mapping[str, Tensor], precision: str) -> Tensor:
    """`[token d_vocab]` in float64."""
    description, plan = session.description(), session.plan
    every = taps(plan.spec, session.plan.backend_key, plan.config, description.version)
    sides.out.mkdir(parents=True, exist_ok=True)
    inputs = {}
    for site, value in replaced.items():
        path = sides.out / f"{site}.safetensors"
        save_file({"x": value.float().contiguous()}, path)
        inputs[site] = str(path)
    request = RunRequest(
        probe=probe, taps=tuple(tap for tap in every if tap.site == LOGITS or tap.site in replaced),
        out=str(sides.out / "run"), precision=precision, inputs=inputs,
    )  # fmt: skip
    reply = session.replay(request) if replaced else session.run(request)
    entry = next(entry for entry in reply.entries if entry.site == LOGITS)
    return f64(load_file(sides.out / "run" / entry.file)["x"][real(probe)])


@one_thread()
def _edited(sides: Sides, probe: Probe, plain: _Logits, site: str) -> HookEdit | NotTested:
    edit = edited(sides.judge.tensor(probe.name, site).float(), site)
    direct = {site: edit}
    through = _through_attention(sides, probe, site, edit)
    made = _Logits(sides, probe, direct, through or direct)
    effect, own_effect = _rms(made.judge - plain.judge), _rms(made.candidate - plain.candidate)
    floor = _rms(made.reference - made.judge)
    if effect <= EXCITED * floor:
        return NotTested(what=f"editing {site}", why="the edit moves nothing in the reference")
    ratio = noise_ratio(_rms(made.candidate - made.judge), floor, _rms(made.judge), sides.dtype)
    same = ratio <= limit_of(LOGITS)
    says = "" if same else _says(sides, probe, site, plain, made, direct if through else {}, limit_of(LOGITS) * floor)
    return HookEdit(
        site=site, same=same, noise_ratio=ratio, reference_effect=effect, candidate_effect=own_effect, says=says
    )


def edited(value: Tensor, site: str) -> Tensor:
    """The tensor that is put in place of a site's own."""
    value = value.clone()
    if site.endswith(ATTENTION_SITES):
        value[:, :, 1::2] *= MATRIX_TIMES  # axis 2 is the query; what is masked stays masked
    else:
        value[:, 1::2] = value[:, 1::2].flip(-1)
    return value


def _through_attention(sides: Sides, probe: Probe, site: str, edit: Tensor) -> dict[str, Tensor] | None:
    """The edit of resid_mid as an edit of attn_out; None for other sites."""
    if local_name(site) != MID:
        return None
    added = site.removesuffix(MID) + "attn_out"
    mid, out = (sides.judge.tensor(probe.name, name).double() for name in (site, added))
    return {added: (out + edit.double() - mid).float()}


def _says(
    sides: Sides, probe: Probe, site: str, plain: _Logits, made: _Logits, norm_only: Mapping[str, Tensor], rounding: float
) -> str:  # fmt: skip
    """What an edit does instead."""
    moved = made.candidate - plain.candidate
    if _rms(moved) <= rounding:
        return "the edit has no effect: the hook shows a tensor that nothing reads"
    if norm_only:
        lost = _run(sides, sides.judging, probe, norm_only, FLOAT64)
        if _rms(lost - made.candidate) <= rounding:
            return "the edit reaches the norm after it, and not the residual stream"
    meant = made.judge - plain.judge
    cosine = float((moved * meant).sum() / (moved.norm() * meant.norm()).clamp_min(1e-300))
    size = _rms(moved) / _rms(meant)
    return f"the logits move {size:.3g} times as far as they should, in a direction with cosine {cosine:.3g} to the right one"


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
