"""The same edit for both sides: at the hook or site of the candidate, and at the equivalent sites of the judging side.

    a site            x' = x with its last axis reversed at every second position (scores and pattern: times 1.5)
    ln.hook_scale     s' = c s       =>  the norm's output  y' = (y - bias) / c + bias     c = 1.5 at every second position, else 1
    ln.hook_normalized  n' = c n     =>  y' = (y - bias) c + bias
    attn.hook_result  r' = c r       =>  attn_proj' = attn_proj + sum over heads of (r' - r) for every second head

`resid_mid` is read by the norm *and* by the next residual sum. transformers has no single tensor that feeds both: there the
edit is made on attn_out, as attn_out + (x' - resid_mid), because an edit of the norm's input reaches the norm only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity_audit.capture.session import SidePlan
from parity_audit.capture.store import Capture
from parity_audit.checks.promised import ExpectedTensors
from parity_audit.core.sites import ATTENTION_SITES, NORM_ROLES, layer_of, local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import f64
from parity_audit.specs.hook_names import ADDED_RESULT, NORMALIZED, RESULT, SCALE, Hook

EDIT_FACTOR = 1.5
"""The factor of an edit: large enough to move the logits clearly, too small to saturate a softmax or a soft-cap."""
MID = "resid_mid"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The same edit on both sides: the replacement tensors by hook or site.

    `norm_only` is the judging-side edit that would reach only the norm after the site and not the residual stream.
    """

    name: str
    candidate: Mapping[str, Tensor]
    judging: Mapping[str, Tensor]
    norm_only: Mapping[str, Tensor] = field(default_factory=dict)


class Changes:
    """Builds edits from the tensors that the judge captured."""

    def __init__(self, judge: Capture, probe: Probe, plan: SidePlan) -> None:
        self.judge, self.probe = judge, probe
        self.promises = ExpectedTensors(judge, probe, plan)

    def at_site(self, site: str) -> Change:
        """Return the edit of a site, addressed by the site's name."""
        return self._value(site, site)

    def at_hook(self, hook: Hook) -> Change | str:
        """Return the edit of a hook, addressed by the hook's name, or the reason why the judging side cannot make it."""
        if hook.promises in (SCALE, NORMALIZED):
            return self._norm(hook)
        if hook.promises in (RESULT, ADDED_RESULT):
            return self._result(hook)
        return self._value(hook.name, hook.site)

    def _value(self, name: str, site: str) -> Change:
        value = self._tensor(site)
        edit = edited(value, site)
        if local_name(site) != MID:
            return Change(name=name, candidate={name: edit}, judging={site: edit})
        added = site.removesuffix(MID) + "attn_out"
        through = {added: self._tensor(added) + edit - value}
        return Change(name=name, candidate={name: edit}, judging=through, norm_only={site: edit})

    def _norm(self, hook: Hook) -> Change | str:
        make = self.promises.of(hook)
        if make is None or hook.site not in self.judge.sites(self.probe.name):
            return "the judging side does not show this norm"
        value, out = make(), self._tensor(hook.site)
        times = _alternating(value)
        bias = self.promises.evidence[layer_of(hook.site)].weight(f"{NORM_ROLES[local_name(hook.site)]}.bias")
        shift = torch.zeros(()) if bias is None else f64(bias)
        gain = 1.0 / times if hook.promises == SCALE else times
        return Change(
            name=hook.name, candidate={hook.name: value * times}, judging={hook.site: (out - shift) * gain + shift}
        )

    def _result(self, hook: Hook) -> Change | str:
        site = hook.site.removesuffix(local_name(hook.site)) + "attn_proj"
        make = self.promises.of(hook)
        if make is None or site not in self.judge.sites(self.probe.name):
            return "the judging side does not show attention's projection"
        value = make()
        changed = value.clone()
        changed[:, :, ::2] *= EDIT_FACTOR
        more = (changed - value).sum(2) / self.promises.multiplier(hook)
        return Change(name=hook.name, candidate={hook.name: changed}, judging={site: self._tensor(site) + more})

    def _tensor(self, site: str) -> Tensor:
        return f64(self.judge.tensor(self.probe.name, site))


def edited(value: Tensor, site: str) -> Tensor:
    """Return the edited copy of a site's tensor that replaces it."""
    value = value.clone()
    if site.endswith(ATTENTION_SITES):
        value[:, :, 1::2] *= EDIT_FACTOR  # axis 2 is the query; what is masked stays masked
    else:
        value[:, 1::2] = value[:, 1::2].flip(-1)
    return value


def _alternating(value: Tensor) -> Tensor:
    """Return factors `[1 pos 1]` for a tensor `[batch pos ...]`: 1 at even positions and `EDIT_FACTOR` at odd ones."""
    times = torch.ones(value.shape[1], dtype=torch.float64)
    times[1::2] = EDIT_FACTOR
    return times[None, :, None]
