"""Compute in float64, from the sites of one capture, the tensor that a hook should hold (see `specs.hook_names`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from einops import einsum, rearrange
from torch import Tensor

from parity_audit.capture.session import SidePlan
from parity_audit.capture.store import Capture
from parity_audit.core.sites import FINAL_NORM, NORMS, final_norm_reads, layer_of, local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, evidence_by_layer, f64
from parity_audit.specs.hook_names import ADDED_RESULT, NORMALIZED, RESULT, SCALE, Hook

Make = Callable[[], Tensor]


class ExpectedTensors:
    """The tensors that hooks should hold, computed from one capture."""

    def __init__(self, capture: Capture, probe: Probe, plan: SidePlan) -> None:
        self.capture, self.probe = capture, probe
        self.evidence: Mapping[int | None, Evidence] = evidence_by_layer("judge", [capture], plan)

    def of(self, hook: Hook) -> Make | None:
        """Return a function that computes the tensor the hook should hold; None if the capture lacks the sites it needs."""
        held = self.capture.sites(self.probe.name)
        layer = self.evidence[layer_of(hook.site)]
        if hook.promises in (SCALE, NORMALIZED):
            site = norm_input(hook.site, held, layer.dims["n_layers"])
            return None if site is None else lambda: normalised(hook, self._tensor(site), layer)
        if hook.site not in held or (hook.promises == ADDED_RESULT and "residual.scale" not in layer.knobs):
            return None
        if hook.promises in (RESULT, ADDED_RESULT):
            weight, times = layer.weight("attn.o"), self.multiplier(hook)
            return None if weight is None else lambda: times * results(self._tensor(hook.site), weight)
        return lambda: self.capture.tensor(self.probe.name, hook.site)

    def multiplier(self, hook: Hook) -> float:
        """Return the factor of the heads' results: the residual scale if the hook shows what is added to the residual, else 1."""
        layer = self.evidence[layer_of(hook.site)]
        return layer.spec_number("residual.scale", 1.0) if hook.promises == ADDED_RESULT else 1.0

    def _tensor(self, site: str) -> Tensor:
        return f64(self.capture.tensor(self.probe.name, site))


def norm_input(site: str, held: set[str], n_layers: int) -> str | None:
    """Return the captured site that is the input of the norm whose output is `site`; None if it was not captured."""
    if site == FINAL_NORM:
        names = list(final_norm_reads(n_layers))
    else:
        block = site.removesuffix(local_name(site))
        names = [block + name for name in NORMS[local_name(site)][0]]
    return next((name for name in names if name in held), None)


def normalised(hook: Hook, x: Tensor, layer: Evidence) -> Tensor:
    """Return the norm's scale `[batch pos 1]`, or its output before weight and bias `[batch pos d_model]`."""
    if layer.spec_value("norm.kind") == "layer":
        x = x - x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) + layer.spec_number("norm.eps", 0.0)).sqrt()
    return scale if hook.promises == SCALE else x / scale


def results(z: Tensor, weight: Tensor) -> Tensor:
    """Return each head's result `[batch pos head d_model]`: its z `[batch pos head d_head]` times its own columns of W_O.

    `weight` is W_O, `[d_model (head d_head)]`.
    """
    per_head = rearrange(f64(weight), "d_model (head d_head) -> head d_head d_model", head=z.shape[2])
    return einsum(z, per_head, "b p head d_head, head d_head d_model -> b p head d_model")
