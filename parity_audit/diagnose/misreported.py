"""Find hooks that show another tensor than the one that is added to the residual stream.

The judge replays the candidate's own activations. If `attn_out` differs from what the judge computes from the
candidate's inputs, but the candidate's `resid_mid - resid_pre` agrees with it, attention is right and the hook shows
another tensor. The sum then appears wrong as well (`resid_mid` is not `resid_pre + attn_out`): it inherits this from
the hook and has no error of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parity_audit.compare.floor import noise_ratio
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import limit_of
from parity_audit.core.report import Finding
from parity_audit.core.sites import local_name
from parity_audit.core.types import Probe
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.diagnose.identities import Identity, identities

ADDED = ("attn_out", "mlp_out")
Ratios = dict[tuple[str, str], float]


@one_thread()
def misreported(
    own: TensorSource, replay: TensorSource, ratios: Mapping[tuple[str, str], float], dtype: str
) -> tuple[Finding, ...]:
    """One finding per hook that shows another tensor than the one that is added, with the layers where it does.

    Args:
        own: the candidate's capture.
        replay: the judge's replay of it.
        ratios: introduced ratios by (probe, site); see `diagnose.localise`.
        dtype: the dtype in which the candidate computes.
    """
    layers: dict[str, set[int]] = {}
    for probe in own.probes:
        wrong = {site for (name, site), ratio in ratios.items() if name == probe.name and ratio > limit_of(site)}
        for identity in identities(own.sites(probe.name) & replay.sites(probe.name)) if wrong else ():
            for term in identity.terms:
                if term in ADDED and _at(identity, term) in wrong and _added(own, replay, probe, identity, term, dtype):
                    layers.setdefault(term, set()).add(identity.layer)
    return tuple(_finding(term, sorted(found)) for term, found in layers.items())


def without(ratios: Ratios, findings: tuple[Finding, ...]) -> Ratios:
    """The ratios without those of the misreporting hooks, and of the sums that appear wrong because of them."""
    hooks = {f"blocks.{layer}.{local_name(finding.site)}" for finding in findings for layer in finding.layers or ()}
    shown = {site for _, site in ratios}
    sums = {_sum_with(hook, shown) for hook in hooks}
    return {(probe, site): ratio for (probe, site), ratio in ratios.items() if site not in hooks | sums}


def _sum_with(hook: str, shown: set[str]) -> str:
    """The sum that a hook's value is added to; a parallel block has one sum for both sublayers."""
    block = hook.removesuffix(local_name(hook))
    middle = f"{block}resid_mid"
    return middle if hook.endswith("attn_out") and middle in shown else f"{block}resid_post"


def _at(identity: Identity, name: str) -> str:
    return f"blocks.{identity.layer}.{name}"


def _added(
    own: TensorSource, replay: TensorSource, probe: Probe, identity: Identity, term: str, dtype: str
) -> bool:  # fmt: skip
    """Whether the tensor that the candidate really adds in place of a term is the judge's value for the candidate's
    inputs."""
    kept = torch.tensor(probe.mask, dtype=torch.bool)

    def tensor(source: TensorSource, name: str) -> Tensor:
        site = _at(identity, name)
        return source.rows(probe.name, site, 0, source.shape(probe.name, site)[1])[kept].double()

    total = tensor(own, identity.total)
    others = [tensor(own, name) for name in identity.terms if name != term]
    apart = total - torch.stack(others).sum(0) - tensor(replay, term)
    # The rounding of a sum is relative to the size of the sum, here the residual stream.
    return noise_ratio(_rms(apart), 0.0, _rms(total), dtype) <= limit_of(_at(identity, term))


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


def _finding(term: str, layers: list[int]) -> Finding:
    what = "attention" if term == "attn_out" else "the MLP"
    return Finding(
        knob=term, kind="hook", layers=tuple(layers), site=f"blocks.{layers[0]}.{term}", reference_value=term,
        candidate_value="something else", confidence=BY_COMPARISON, departs_from_spec="candidate",
        message=f"{term} shows something else than what {what} adds to the residual stream, which is right",
    )  # fmt: skip
