"""Merge findings about wrong tensors: exchanged blocks become one finding, and consequences of a wrong tensor are dropped."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from parity_audit.checks.preflight import KNOB, SKETCH_TOLERANCE, same_weight
from parity_audit.core.report import Finding
from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import WeightPrint
from parity_audit.diagnose.structure.projections import PROJECTIONS
from parity_audit.diagnose.structure.sample import NOT_STORED
from parity_audit.diagnose.thresholds import SHOWN
from parity_audit.formulas.choices import OWN

TensorOf = Mapping[tuple[str, "int | None"], str]
EXPERTS = ".experts."
"""The part of a tensor's name by which an expert's tensor is recognised."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
OF_HEADS = ("norm.q", "norm.k")
"""The roles of the norms of queries and keys."""
ROLES_OF = {
    "logits": ("unembed",), "embed": ("embed",), "qkv": ("attn.q", "attn.k", "attn.v"), "attn_proj": ("attn.o",),
    "mlp": ("mlp.",), "norm": ("norm.",), "final_norm": ("norm.final",), "qk_norm": OF_HEADS,
    "rope": OF_HEADS, "pos_embed": ("pos_embed",), "delta": ("delta.",), "laurel": ("laurel.",), "altup": ("altup.",),
    "per_layer": ("per_layer.",),
}  # fmt: skip
EXCHANGED, GATE_AND_UP = "mlp.gate_up", ("mlp.gate", "mlp.up", "moe.gate", "moe.up")
"""The knob that says whether an MLP's two input projections are exchanged, and the roles of their tensors."""
SOURCE = ".source"
"""The suffix of a knob that names what replaces a component's values: redundant if the component's tensor is wrong."""
PER_CHANNEL = (".out.gain", ".out.bias")
"""Suffixes of knobs that describe a norm's output per channel: what another weight or bias of the norm leads to."""
BIAS = "_bias"
"""The suffix of the knob of a projection's bias."""
OF_A_NORM = ("norm.offset", "norm.gain", "norm.weight", "norm.bias")
ROLE_OF = {"attention.sinks": "attn.sinks", "moe.choice_bias": "moe.choice_bias", "pos_embed.offset": "pos_embed",
           "embed.scale": "embed", "logits.scale": "unembed"}  # fmt: skip
"""Knobs that describe how one tensor differs, with the role of that tensor."""
OF_A_HEADS_NORM = ("qk_norm.offset", "qk_norm.gain")
READ_OFF = ("weights.", "norm.weight", "norm.bias", "qk_norm.weight", "qk_norm.bias")


def with_origins(
    findings: Sequence[Finding], reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint], dtype: str
) -> list[Finding]:
    """Add to each finding the name of the reference's tensor that the candidate holds instead, if it is one of them."""
    held = {item.name: item for item in candidate}
    named = [_with_origin(finding, held[finding.site], reference, SKETCH_TOLERANCE[dtype]) for finding in findings]
    return _exchanged(named)


def _with_origin(finding: Finding, held: WeightPrint, reference: Sequence[WeightPrint], tolerance: float) -> Finding:
    origin = next((item.name for item in reference if item.rms > 0 and same_weight(item, held, tolerance)), None)
    if origin is None or held.rms == 0:
        return finding
    return dataclasses.replace(
        finding, candidate_value=origin, reference_value=finding.site, evidence={**finding.evidence, "holds": origin},
        message=f"tensor {finding.site} of the candidate holds the reference's {origin}",
    )  # fmt: skip


def _exchanged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the findings of exchanged blocks into one: blocks of which several tensors come from the same other block."""
    moves: dict[tuple[int, int], list[Finding]] = {}
    for finding in findings:
        move = _move(finding)
        if move is not None:
            moves.setdefault(move, []).append(finding)
    whole = {move: group for move, group in moves.items() if len(group) > 1}
    if not whole:
        return list(findings)
    gone = {id(finding) for group in whole.values() for finding in group}
    return [_moved(whole), *(finding for finding in findings if id(finding) not in gone)]


def _move(finding: Finding) -> tuple[int, int] | None:
    """Return (block, block whose tensor it holds); None unless the tensor is the same one of another block."""
    origin = finding.evidence.get("holds")
    if origin is None or NUMBER.sub("{l}", finding.site) != NUMBER.sub("{l}", origin):
        return None
    own, other = NUMBER.search(finding.site), NUMBER.search(origin)
    return (int(own[0]), int(other[0])) if own and other and own[0] != other[0] else None


def _moved(moves: Mapping[tuple[int, int], Sequence[Finding]]) -> Finding:
    pairs = sorted(moves)
    findings = [finding for move in pairs for finding in moves[move]]
    first, said = findings[0], ", ".join(f"block {own} holds those of block {other}" for own, other in pairs)
    return dataclasses.replace(
        first, layers=tuple(sorted({own for own, _ in pairs})), reference_value="each block's own", candidate_value=said,
        evidence={**first.evidence, "tensors": [finding.site for finding in findings]},
        message=f"tensors of blocks are exchanged: {said}",
    )  # fmt: skip


def grouped(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings of one tensor name in several blocks or experts that have the same fault, and findings of tied tensors."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in _tied_as_one(findings):
        groups.setdefault(_alike(finding), []).append(finding)
    return [group[0] if len(group) == 1 else _together(group) for group in groups.values()]


def _tied_as_one(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the findings of tensors outside the blocks that are identical on both sides: a tied embedding and unembedding."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        is_outside = only_differs(finding) and finding.layers is None
        shown = [str(finding.evidence[f"{side}_sha256"]) for side in ("reference", "candidate")] if is_outside else []
        groups.setdefault(tuple(shown) or (str(id(finding)),), []).append(finding)
    return [group[0] if len(group) == 1 else _tied(group) for group in groups.values()]


def _tied(group: Sequence[Finding]) -> Finding:
    first, names = group[0], [finding.site for finding in group]
    return dataclasses.replace(
        first, evidence={**first.evidence, "tensors": names},
        message=f"tensor {' = '.join(names)} of the candidate is not the reference's: {first.evidence['differs_in']}",
    )  # fmt: skip


def _alike(finding: Finding) -> tuple[str, ...]:
    """Return the key by which findings are grouped: tensor names without numbers, and the fault."""
    if finding.kind != KNOB or "tensor" not in finding.evidence:
        return (str(id(finding)),)
    holds = str(finding.evidence.get("holds", ""))
    return NUMBER.sub("*", finding.site), str(finding.evidence["differs_in"]), NUMBER.sub("*", holds), _step(finding)


def _step(finding: Finding) -> str:
    """Say for each number in a tensor's name whether the tensor that it holds has the same or another number there."""
    holds = finding.evidence.get("holds")
    if holds is None:
        return ""
    own, other = (NUMBER.findall(name) for name in (finding.site, str(holds)))
    return " ".join("same" if a == b else "other" for a, b in zip(own, other, strict=False))


def _together(group: Sequence[Finding]) -> Finding:
    first, names = group[0], [name for item in group for name in item.evidence.get("tensors", [item.site])]
    layers = tuple(sorted({layer for item in group for layer in item.layers or ()}))
    what, holds = NUMBER.sub("*", first.site), first.evidence.get("holds")
    holds = None if holds == first.site else holds
    differ = f"are not the reference's: {first.evidence['differs_in']}"
    said = f"hold the reference's {NUMBER.sub('*', str(holds))}" if holds else differ
    return dataclasses.replace(
        first, layers=layers or None, reference_value=what if holds else first.reference_value,
        candidate_value=NUMBER.sub("*", str(holds)) if holds else first.candidate_value,
        evidence={**first.evidence, "tensors": names, **_origins(group)},
        message=f"{len(names)} tensors {what} of the candidate {said}",
    )  # fmt: skip


def _origins(group: Sequence[Finding]) -> dict[str, list[str]]:
    """List which numbers hold which others, for tensors that hold another tensor; at most `SHOWN` entries."""
    moved = [(NUMBER.findall(item.site), NUMBER.findall(str(item.evidence.get("holds", "")))) for item in group]
    said = [f"{'.'.join(own)} holds {'.'.join(other)}" for own, other in moved if other and own != other]
    return {"moved": said[:SHOWN]} if said else {}


def with_right_tensors(
    findings: Sequence[Finding], compared: Sequence[WeightPrint], tensor_of: TensorOf
) -> list[Finding]:
    """Add to findings of a projection with a wrong output that its live tensor is the checkpoint's, if it is.

    The user then need not look for the error in the tensor. `compared`: the candidate's tensors that were compared with the
    reference's.
    """
    wrong = {name for finding in findings for name in finding.evidence.get("tensors", [finding.site])}
    right = {item.name for item in compared} - wrong
    return [_with_right_tensor(finding, right, tensor_of) for finding in findings]


def _with_right_tensor(finding: Finding, right: set[str], tensor_of: TensorOf) -> Finding:
    roles = _roles_in_model(roles_of_knob(finding.knob), tensor_of)
    layers = finding.layers or _layers_with_roles(roles, tensor_of)
    names = {name for (role, at), name in tensor_of.items() if role in roles and at in layers}
    if finding.candidate_value != NOT_STORED or not names or not names <= right:
        return finding
    said = "is not what the checkpoint's weights make of its input, though the tensor is the checkpoint's"
    return dataclasses.replace(
        finding, message=f"{finding.site} {said}: something is done to its input or its output",
        evidence={**finding.evidence, "tensor_is": OWN},
    )  # fmt: skip


def without_repeated_tensor_findings(findings: Sequence[Finding], tensor_of: TensorOf) -> list[Finding]:
    """Drop findings that say only that tensors differ if fits say how; the dropped tensors are listed in those fits' evidence."""
    findings = _fused_as_one(findings, tensor_of)
    fits = {id(one): names for one in findings if (names := _fitted(one, tensor_of))}
    explained = set().union(*fits.values())
    gone = {id(one) for one in findings if only_differs(one) and explained.issuperset(tensors_of(one))}
    differ = [name for one in findings if id(one) in gone for name in tensors_of(one)]
    left = [one for one in findings if id(one) not in gone]
    return [_with_tensors(one, [name for name in differ if name in fits.get(id(one), ())]) for one in left]


def _fused_as_one(findings: Sequence[Finding], tensor_of: TensorOf) -> list[Finding]:
    """Drop the fits of several parts of one fused tensor if they only say that the tensor is not the checkpoint's."""
    known = {name for one in findings if only_differs(one) for name in tensors_of(one)}
    parts: dict[frozenset[str], list[Finding]] = {}
    for one in findings:
        names = frozenset(_fitted(one, tensor_of)) if one.candidate_value == NOT_STORED else frozenset()
        if names and names <= known:
            parts.setdefault(names, []).append(one)
    gone = {id(one) for several in parts.values() if len(several) > 1 for one in several}
    return [one for one in findings if id(one) not in gone]


def only_differs(finding: Finding) -> bool:
    """Whether a finding says only that tensors differ from the reference's, without naming what the candidate holds instead."""
    return finding.knob == KNOB and "tensor" in finding.evidence and "holds" not in finding.evidence


def tensors_of(finding: Finding) -> Sequence[str]:
    """Return the names of a finding's tensors: those in its evidence, else its site."""
    named: Sequence[str] = finding.evidence.get("tensors", [finding.site])
    return named


def _fitted(finding: Finding, tensor_of: TensorOf) -> set[str]:
    """Return the checkpoint tensors that a fit determined from a component's output.

    Empty if the finding is no such fit, or if it says that the tensors are right and were given other inputs.
    """
    knob = finding.knob
    if _is_of_other_inputs(finding):
        return set()
    if knob.startswith(OF_A_NORM) or knob.endswith(PER_CHANNEL):
        norms = {(_role_of_norm(site), layer) for site, layer in _places(finding)}
        return {name for (role, at), name in tensor_of.items() if (role.removesuffix(".bias"), at) in norms}
    if knob in ROLE_OF:
        own: tuple[str, ...] = (ROLE_OF[knob],)
    elif knob.startswith((*READ_OFF, *OF_A_HEADS_NORM)) or knob.endswith(BIAS):
        own = _roles_in_model(roles_of_knob(knob), tensor_of)
        if knob.startswith("weights.") and finding.candidate_value != NOT_STORED:
            own += tuple(f"{role}.bias" for role in own)  # this fit explains the output, bias included, up to rounding
    elif "component" in finding.evidence and finding.kind != "unexplained":
        made_by = _made_by({local_name(finding.site)}, tensor_of)
        own = (*made_by, *(f"{role}.bias" for role in made_by))
    else:
        return set()
    layers = finding.layers or _layers_with_roles(own, tensor_of)
    return {name for (role, at), name in tensor_of.items() if role in own and at in layers}


def _is_of_other_inputs(finding: Finding) -> bool:
    """Whether a fit says that a projection applies the checkpoint's tensor to other inputs."""
    return str(finding.candidate_value).startswith(f"{OWN},")


def _places(finding: Finding) -> set[tuple[str, int | None]]:
    """Return where a fit of a norm was read, as pairs (site without its block, layer)."""
    read = [entry for entry in finding.evidence.get("candidate", ()) if isinstance(entry, dict)]
    sites = finding.evidence.get("sites", [finding.site])
    places = {(str(entry.get("read_from")), entry.get("layer")) for entry in read}
    return places or {(local_name(site), layer_of(site)) for site in sites}


def _role_of_norm(site: str) -> str:
    return f"norm.{site.removesuffix('.out').removeprefix('ln_')}"


def _with_tensors(finding: Finding, names: Sequence[str]) -> Finding:
    return dataclasses.replace(finding, evidence={**finding.evidence, "tensors": list(names)}) if names else finding


def without_consequences(findings: Sequence[Finding], weights: Sequence[Finding], tensor_of: TensorOf) -> list[Finding]:
    """Drop the findings that only repeat that a tensor is wrong.

    `tensor_of`: the checkpoint tensor of a role in a layer (None: outside the blocks). Fits that say *how* a tensor
    differs stay, unless the tensor is known to be another one of the checkpoint.
    """
    wrong = {name for finding in weights for name in finding.evidence.get("tensors", [finding.site])}
    moved = {
        name
        for finding in weights
        if "holds" in finding.evidence
        for name in finding.evidence.get("tensors", [finding.site])
    }
    return [finding for finding in findings if not _follows(finding, wrong, moved, tensor_of)]


def _follows(finding: Finding, wrong: set[str], moved: set[str], tensor_of: TensorOf) -> bool:
    if finding.kind == "unexplained" and finding.evidence.get("component") == "mlp_out":
        return _in_experts(finding, wrong)
    roles = ROLES_OF.get(str(finding.evidence.get("component")), ())
    if finding.kind == "unexplained" or finding.knob.endswith(SOURCE):
        known = wrong
    elif finding.knob.endswith(PER_CHANNEL):
        known = moved
    elif finding.knob.startswith(OF_A_NORM) and (behind := _made_by({site for site, _ in _places(finding)}, tensor_of)):
        roles, known = behind, moved  # the norm's output was not captured, so the fit used what reads it
    elif finding.knob == EXCHANGED:
        roles, known = GATE_AND_UP, moved
    elif finding.knob.startswith(READ_OFF) or finding.knob.endswith(BIAS):
        known = wrong if _is_of_other_inputs(finding) else moved
        roles = _roles_in_model(roles_of_knob(finding.knob), tensor_of)
    else:
        return False
    layers = finding.layers or _layers_with_roles(roles, tensor_of)
    return bool(roles and layers) and all(
        any(role.startswith(roles) and layer == at and name in known for (role, at), name in tensor_of.items())
        for layer in layers
    )


def _made_by(sites: set[str], tensor_of: TensorOf) -> tuple[str, ...]:
    """Return the roles of the projections whose outputs are these sites; empty if one site is not a projection's output."""
    roles = {item.output: item.role for item in PROJECTIONS}
    return _roles_in_model(tuple(roles[site] for site in sites), tensor_of) if sites <= roles.keys() else ()


def _roles_in_model(roles: tuple[str, ...], tensor_of: TensorOf) -> tuple[str, ...]:
    """Return the roles under the model's names: a plain MLP's input projection is fitted as `gate`, but its role is `up`."""
    known = any(role.startswith(roles) for role, _ in tensor_of)
    return roles if known else tuple(role.replace("mlp.gate", "mlp.up") for role in roles)


def _layers_with_roles(roles: Sequence[str], tensor_of: TensorOf) -> list[int | None]:
    """Return the layers that have tensors of these roles (None: outside the blocks): those meant by a finding without layers."""
    return sorted({at for role, at in tensor_of if role.startswith(tuple(roles))}, key=str)


def _in_experts(finding: Finding, wrong: set[str]) -> bool:
    """Whether every layer of an unexplained finding at mlp_out has a wrong expert tensor, which then explains it.

    No captured site lies between an expert's tensor and mlp_out.
    """
    at = {int(number[0]) for name in wrong if EXPERTS in name and (number := NUMBER.search(name))}
    return bool(finding.layers) and set(finding.layers or ()) <= at


def roles_of_knob(knob: str) -> tuple[str, ...]:
    """Return the tensor roles that a fit's knob is about: attn.q for `weights.attn.q.scale`, attn.q.bias for
    `attention.q_bias`, and every norm for `norm.weight`."""
    if knob.startswith("weights."):
        return (knob.removeprefix("weights.").removesuffix(".scale"),)
    if knob.endswith(BIAS):
        return (f"{knob.removesuffix(BIAS).replace('attention.', 'attn.')}.bias",)
    return OF_HEADS if knob.startswith("qk_norm.") else ("norm.",)
