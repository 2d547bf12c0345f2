"""Find causes that only a sharded engine has: ranks with wrong tensors, settings or values, and wrong sums, cuts and joins.

The tensors and settings that the ranks hold are checked first. Then the check looks for the first site, in computation order,
where ranks disagree or where the joined value differs from the reference's. All earlier sites agree with the reference, so
the reference's value is the right one at that site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from safetensors.torch import load_file
from torch import Tensor

from parity_audit.capture.store import TENSOR, Capture
from parity_audit.checks import sharding_forms as forms
from parity_audit.checks.sharding_knobs import EPS, NORMED, SCALE, eps_of, scale_of
from parity_audit.compare.floor import dtype_eps
from parity_audit.core.report import Finding
from parity_audit.core.shards import OTHER_PLACES, OWN, PART_OF_RANK, SPLIT, SUM, RankShare, RankTensor, RankValue
from parity_audit.core.sites import ATTENTION_SITES, RETURNED, layer_of, local_name, site_order
from parity_audit.core.types import KnobValue, Probe, WeightPrint
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.diagnose.evidence import f64, real

EXPERTS = ".experts."
KIND = "sharding"
KNOBS = {
    "all_reduce": "sharding.all_reduce", "bias": "sharding.bias", "norm": "sharding.norm", "fused": "sharding.fused_order",
    "kv": "sharding.kv_heads", "vocabulary": "sharding.vocabulary", "experts": "sharding.experts",
    "tokens": "sharding.tokens", "weights": "sharding.weights", "rank": "sharding.rank", "order": "sharding.rank_order",
}  # fmt: skip
BIASES = {
    "attn_proj": "attn.o.bias",
    "attn_out": "attn.o.bias",
    "mlp_proj": "mlp.down.bias",
    "mlp_out": "mlp.down.bias",
}
ROUNDINGS = 1000.0
"""Tolerance in roundings of the dtype, relative: far above the rounding of earlier layers, far below any of these faults."""
UNREPAIRED = "no setting is known for it: it is made where the engine cuts the model over its ranks"


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A side that ran on several ranks, and the reference.

    `roles` maps a checkpoint tensor's name to its role; `weight(role, layer)` returns a tensor (None if there is none);
    `values` are the live settings in which ranks differ.
    """

    capture: Capture
    reference: Capture
    values: tuple[RankValue, ...]
    spec: Mapping[str, KnobValue]
    roles: Mapping[str, str]
    weight: Callable[[str, Union[int, None]], Union[Tensor, None]]
    dtype: str

    def bias(self, site: str) -> Tensor | None:
        """Return the bias of the projection whose output is this site, in float64; None if it has none."""
        role = BIASES.get(local_name(site))
        value = None if role is None else self.weight(role, layer_of(site))
        return None if value is None else f64(value)

    @property
    def tolerance(self) -> float:
        """Relative distance above which two values are not the same up to rounding."""
        return ROUNDINGS * dtype_eps(self.dtype)


def sharding_findings(case: Sharded) -> list[Finding]:
    """Return the faults of the sharding; empty if there is none or if the side is not sharded."""
    shares = case.capture.manifest.shares
    if not shares:
        return []
    held = [*_values(case), *_tensors(case)]
    return held or next(filter(None, (_first(case, probe) for probe in _probes(case))), [])


def _probes(case: Sharded) -> Iterator[Probe]:
    """Return the probes of a single row, longer than one token, that capture every site."""
    return (
        probe for probe in case.capture.probes if probe.sites == "all" and probe.shape[0] == 1 and probe.shape[1] > 1
    )


def _values(case: Sharded) -> Iterator[Finding]:
    """Yield a finding per knob whose live value differs between ranks; a rank that departs from the spec is wrong."""
    seen: dict[str, RankValue] = {}
    for item in case.values:
        seen.setdefault(item.knob, item)
    for knob, item in seen.items():
        spec = case.spec.get(knob)
        wrong = _wrong_ranks(item, spec)
        said = ", ".join(f"{value!r} on rank {rank}" for rank, value in zip(item.ranks, item.values, strict=True))
        yield _finding(
            knob,
            f"ranks differ: the live value behind {knob} is {said}",
            wrong,
            None,
            "",
            spec,
            list(item.values),
            {"live": list(item.values)},
        )


def _wrong_ranks(item: RankValue, spec: KnobValue) -> list[int]:
    """Return the wrong ranks: those whose value, or its inverse, is farther from the spec's number than the nearest rank's.

    If the values are no numbers, return the ranks whose value differs from the first rank's.
    """
    if isinstance(spec, (int, float)) and spec and all(isinstance(value, (int, float)) for value in item.values):
        distances = [min(abs(value - spec), abs(value - 1 / spec)) for value in item.values]
        return [rank for rank, far in zip(item.ranks, distances, strict=True) if far > min(distances)]
    return [rank for rank, value in zip(item.ranks, item.values, strict=True) if value != item.values[0]]


def _tensors(case: Sharded) -> Iterator[Finding]:
    """Yield findings for tensors of which some rank does not hold its own part, one per owning module and kind of fault.

    If a module has a fused tensor that is cut wrongly, its other tensors are not reported.
    """
    groups: dict[tuple[str, str], list[WeightPrint]] = {}
    for item in case.capture.manifest.weights:
        if item.ranks is not None:
            groups.setdefault((_owner(item.name), _knob_of(case, item, item.ranks)), []).append(item)
    fused = {owner for owner, knob in groups if knob == KNOBS["fused"]}
    for (owner, knob), items in groups.items():
        if owner in fused and knob != KNOBS["fused"]:
            continue
        names = [item.name for item in items]
        wrong = dict.fromkeys((rank, what) for item in items for rank, what in _wrong(item.ranks))
        said = ", ".join(f"rank {rank} holds {what}" for rank, what in wrong)
        number = next((part for part in owner.split(".") if part.isdigit()), None)
        yield _finding(
            knob, f"{', '.join(names[:4])}: {said}", sorted({rank for rank, _ in wrong}),
            None if number is None else (int(number),), names[0], "each rank its own part", said, {"tensors": names},
        )  # fmt: skip


def _owner(name: str) -> str:
    """Return the module above a tensor's own: parts of one fused tensor share it, and so do all experts of a layer."""
    if EXPERTS in name:
        return name.partition(EXPERTS)[0]
    return name.rpartition(".")[0].rpartition(".")[0] or name


def _wrong(tensor: RankTensor | None) -> list[tuple[int, str]]:
    assert tensor is not None
    return [(rank, what) for rank, what in zip(tensor.ranks, tensor.holds, strict=True) if what != OWN]


def _knob_of(case: Sharded, item: WeightPrint, tensor: RankTensor) -> str:
    wrong = {what for _, what in _wrong(tensor)}
    if OTHER_PLACES in wrong:
        return KNOBS["experts" if EXPERTS in item.name else "fused"]
    if all(what.startswith(PART_OF_RANK.partition("{")[0]) for what in wrong):
        return KNOBS["kv"] if case.roles.get(item.name, "").startswith(("attn.k", "attn.v")) else KNOBS["order"]
    return KNOBS["weights"]


def _first(case: Sharded, probe: Probe) -> list[Finding]:
    """Return the cause at the first site of a probe that differs from the reference or between ranks."""
    shares = {share.site: share for share in case.capture.manifest.shares if share.probe == probe.name}
    both = case.capture.sites(probe.name) & case.reference.sites(probe.name)
    summand: RankShare | None = None
    for site in sorted((s for s in both if not s.endswith(ATTENTION_SITES) and s != RETURNED), key=site_order):
        share = shares.get(site)
        found, expected = (f64(side.tensor(probe.name, site)[real(probe)]) for side in (case.capture, case.reference))
        if found.shape != expected.shape:
            return []
        if share is not None and max(share.apart, default=0.0) > case.tolerance * forms.size(expected):
            return [_disagree(case, probe, share, expected, summand)]
        if forms.relative_error(found, expected) > case.tolerance:
            return _joined_wrong(case, probe, site, share, found, expected)
        summand = share if share is not None and share.how == SUM else summand
    return []


def _disagree(case: Sharded, probe: Probe, share: RankShare, expected: Tensor, summand: RankShare | None) -> Finding:
    """Explain a site that all ranks should hold whole but where they differ: a missing sum, a wrong eps, or wrong ranks."""
    layer = layer_of(share.site)
    layers = None if layer is None else (layer,)
    evidence = {"apart": list(share.apart), "probe": probe.name, "site": share.site}
    if summand is not None and layer_of(summand.site) == layer:
        said = f"missing after {summand.site}: the ranks go on with their own summands"
        return _finding(
            KNOBS["all_reduce"],
            f"the sum over the ranks is {said}",
            [],
            layers,
            summand.site,
            "once",
            "missing",
            evidence,
        )
    own = [f64(load_file(Path(case.capture.folder) / file)[TENSOR][real(probe)]) for file in share.files]
    far = [forms.relative_error(value, expected) for value in own]
    evidence["distance_to_the_reference"] = far
    total = sum(own[1:], own[0])
    if forms.relative_error(total, expected) < case.tolerance:
        message = f"the sum over the ranks is missing at {share.site}: the ranks' values differ, and add up to the reference's"
        return _finding(KNOBS["all_reduce"], message, [], layers, share.site, "once", "missing", evidence)
    right = [rank for rank, value in zip(share.ranks, far, strict=True) if value <= case.tolerance]
    wrong = [rank for rank in share.ranks if right and rank not in right]
    if wrong and local_name(share.site) in NORMED:
        given = share.site.replace(local_name(share.site), NORMED[local_name(share.site)])
        value = eps_of(
            own[share.ranks.index(wrong[0])], expected, _right(case, probe, given), case.spec, case.tolerance
        )
        if value is not None:
            return _constant(EPS, value, share.site, wrong, case, evidence)
    who = f"rank {', '.join(map(str, wrong))} is wrong" if wrong else "none of them is the reference's"
    return _finding(
        KNOBS["rank"], f"ranks disagree at {share.site}, which all of them should hold whole: {who}", wrong, layers, share.site,
        "the same on every rank", "differs", evidence,
    )  # fmt: skip


def _joined_wrong(
    case: Sharded, probe: Probe, site: str, share: RankShare | None, found: Tensor, expected: Tensor
) -> list[Finding]:
    """Explain a wrong joined value at a site on which the ranks agree or of which each rank holds a part."""
    if share is None:
        return []
    layer, ranks = layer_of(site), len(share.ranks)
    layers = None if layer is None else (layer,)

    def says(knob: str, message: str, value: KnobValue, wrong: Sequence[int] = ()) -> list[Finding]:
        return [
            _finding(
                KNOBS[knob], message, wrong, layers, site, "as one process computes it", value, {"probe": probe.name}
            )
        ]

    tolerance = case.tolerance
    if share.how != SPLIT and forms.relative_error(found, ranks * expected) < tolerance:
        return says(
            "all_reduce", f"{site} is summed over the {ranks} ranks again: {ranks} times the reference's", "doubled"
        )
    bias = case.bias(site)
    if bias is not None and forms.relative_error(found, expected + (ranks - 1) * bias) < tolerance:
        return says("bias", f"the bias of {site} is added on each of the {ranks} ranks", f"{ranks} times")
    tokens = forms.tokens_moved(found, expected, tolerance)
    if tokens is not None:
        return says("tokens", f"the tokens of {site} are put together in another order: {tokens}", tokens)
    if site.endswith(".out") and forms.locally_normed(found, expected, ranks, tolerance):
        return says(
            "norm", f"{site}: each rank norms over its own part of the channels", f"over 1/{ranks} of the channels"
        )
    if share.spans and site == "embed":
        table = case.weight("embed", None)
        ids = [token for token, shown in zip(probe.token_ids[0], probe.mask[0], strict=True) if shown]
        moved = forms.rows_moved(found, None if table is None else f64(table), ids, expected, share.spans, tolerance)
        if moved is not None:
            rank, by = moved
            return says(
                "vocabulary", f"the embeddings of rank {rank}'s part of the vocabulary are moved by {by} id", by, [rank]
            )
    return _parts(case, probe, site, share, found, expected, says)


def _parts(
    case: Sharded, probe: Probe, site: str, share: RankShare, found: Tensor, expected: Tensor, says: Any
) -> list[Finding]:
    """Explain parts that belong to another rank, or that are wrong on some ranks only."""
    axis = -1 if site == "logits" else 1
    if not share.spans or site == "embed":
        return []
    moved = forms.parts_moved(found, expected, share.spans, axis, case.tolerance)
    if moved:
        said = ", ".join(f"rank {other}'s in the place of rank {rank}'s" for rank, other in moved)
        return says("vocabulary" if site == "logits" else "order", f"{site} is joined in another order: {said}", said)  # type: ignore[no-any-return]
    wrong = forms.parts_wrong(found, expected, share.spans, axis, case.tolerance)
    if 0 < len(wrong) < len({rank for rank, _, _ in share.spans}):
        scale = _scale(case, probe, site, share, found, wrong)
        if scale is not None:
            return [_constant(SCALE, scale, site, wrong, case, {"probe": probe.name})]
        who = ", ".join(map(str, wrong))
        return says("rank", f"rank {who} alone computes another {site} in its part", "differs", wrong)  # type: ignore[no-any-return]
    return []


def _scale(
    case: Sharded, probe: Probe, site: str, share: RankShare, found: Tensor, wrong: Sequence[int]
) -> float | None:
    """Return the attention scale of the first wrong rank, if another scale explains its heads; else None."""
    block, inner = site.rpartition(".")[0], local_name(site)
    names = [f"{block}.{name}" for name in ("rot_q", "rot_k", "v")]
    if inner != "z" or not case.reference.sites(probe.name).issuperset(names):
        return None
    heads = next(slice(start, stop) for rank, start, stop in share.spans if rank == wrong[0])
    q, k, v = (_right(case, probe, name) for name in names)
    return scale_of(found, q, k, v, heads, case.spec, case.tolerance)


def _right(case: Sharded, probe: Probe, site: str) -> Tensor:
    return f64(case.reference.tensor(probe.name, site)[real(probe)])


def _constant(
    knob: str, value: float, site: str, wrong: Sequence[int], case: Sharded, evidence: dict[str, Any]
) -> Finding:
    """Return the finding of a knob that has another value on some ranks only."""
    layer, spec = layer_of(site), case.spec.get(knob)
    who = ", ".join(map(str, wrong))
    return _finding(
        knob, f"rank {who} alone computes {site} with {knob} {value:.4g} (spec {spec:.4g})", wrong,
        None if layer is None else (layer,), site, spec, float(f"{value:.6g}"), evidence,
    )  # fmt: skip


def _finding(
    knob: str, message: str, wrong: Sequence[int], layers: tuple[int, ...] | None, site: str, expected: KnobValue,
    value: KnobValue, evidence: dict[str, Any],
) -> Finding:  # fmt: skip
    said = f" (rank {', '.join(map(str, wrong))})" if wrong else ""
    return Finding(
        knob=knob, kind=KIND, layers=layers, site=site, reference_value=expected, candidate_value=value, spec_value=expected,
        evidence={**evidence, "ranks": list(wrong)}, confidence=BY_COMPARISON, departs_from_spec="candidate",
        message=message if all(f"rank {rank}" in message for rank in wrong) else message + said,
    )  # fmt: skip
