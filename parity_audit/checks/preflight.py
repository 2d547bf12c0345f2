"""Check before the verdict that both sides have the same input: token ids, every weight tensor, and settings of the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parity_audit.checks.token_ids import SpecialTokens, TwoRows, first_difference, ways_they_differ
from parity_audit.compare.source import TensorSource
from parity_audit.core.report import Finding
from parity_audit.core.types import Description, KnobValue, NotTested, WeightPrint
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.specs.view import collapse_equal

MESSAGES = '[{"'
"""The first characters of chat messages as JSON, by which they are distinguished from plain texts here."""
KNOB = "weights"
"""The knob of a finding about tensors that differ from the reference's."""
VALUES_DIFFER = "the values differ"
SKETCH_TOLERANCE = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""How far two sketches of one tensor may differ, by the dtype in which a side holds it: a few roundings of that dtype."""
SURE = 0.01
"""An added number is reported only if rounding is at most this share of it, so that two of its digits are right."""


def token_findings(
    reference: Description, candidate: Description, special: SpecialTokens
) -> tuple[str, list[str], list[NotTested]]:
    """Compare both sides' token ids of the same texts.

    Returns a sentence with the number of texts whose ids differ (empty for none), one warning per way in which they differ,
    and the texts that the candidate did not tokenise. The probes are token ids, so a difference does not affect the audit; it
    would affect the user's own runs.
    """
    shared = [text for text in reference.tokenization if text in candidate.tokenization]
    rows = [
        TwoRows(text, reference.tokenization[text], candidate.tokenization[text], chat=text.startswith(MESSAGES))
        for text in shared
    ]
    rows = [row for row in rows if row.ours != row.theirs]
    unseen = [text for text in reference.tokenization if text not in candidate.tokenization]
    warnings = [
        f"{candidate.backend} tokenises {len(same)} of {len(shared)} texts otherwise: {words}; {_example(same[0])}"
        for words, same in ways_they_differ(rows, special)
    ]
    return (
        f"its tokenizer departs in {len(rows)} of {len(shared)} texts" if rows else "",
        warnings,
        [_untokenized(candidate, unseen, shared)] if unseen else [],
    )


def _example(row: TwoRows) -> str:
    at = first_difference(row.ours, row.theirs)
    return f"{row.text!r:.60} is {_around(row.ours, at)} in the reference, {_around(row.theirs, at)} in the candidate"


def _around(ids: Sequence[int], at: int) -> str:
    """Return the token ids around a position as text: two before it and six from it on."""
    start, end = max(0, at - 2), at + 6
    middle = ", ".join(map(str, ids[start:end]))
    return f"[{'..., ' if start else ''}{middle}{', ...' if end < len(ids) else ''}]"


def _untokenized(candidate: Description, unseen: Sequence[str], shared: Sequence[str]) -> NotTested:
    """Say what the candidate did not tokenise, and why: everything, chat messages (it has no template), or some texts."""
    backend = candidate.backend
    if candidate.tokenizer_error:
        why = f"{backend} cannot load the checkpoint's tokenizer: {candidate.tokenizer_error}"
        return NotTested(what="tokenization", why=why)
    if not shared:
        return NotTested(what="tokenization", why=f"{backend} shows no tokenizer here")
    chats = sum(text.startswith(MESSAGES) for text in unseen)
    if chats == len(unseen):
        why = f"{backend} shows none here, so that chat messages ({chats} of the prompts) were not compared"
        return NotTested(what="chat template", why=why)
    return NotTested(
        what="tokenization", why=f"{backend} did not tokenise {len(unseen)} texts, {unseen[0]!r:.60} the first"
    )


def weight_findings(
    reference: Sequence[WeightPrint], candidate: Sequence[WeightPrint], dtype: str, how: str = VALUES_DIFFER
) -> tuple[list[Finding], list[NotTested]]:
    """Return one finding per tensor that differs from the reference's after layout transforms, and the tensors not compared.

    `how`: the description of a tensor with the right shape that is neither a multiple of the reference's nor shifted by a number.
    """
    ours = {item.name: item for item in candidate}
    theirs = {item.name: item for item in reference}
    tolerance = SKETCH_TOLERANCE[dtype]
    findings = [
        _weight_finding(theirs[name], ours[name], how, tolerance)
        for name in sorted(theirs.keys() & ours.keys())
        if not same_weight(theirs[name], ours[name], tolerance)
    ]
    gaps = [
        NotTested(what=f"weight {name}", why="the candidate does not show it") for name in theirs.keys() - ours.keys()
    ]
    return findings, sorted(gaps, key=lambda gap: gap.what)


def same_weight(a: WeightPrint, b: WeightPrint, tolerance: float) -> bool:
    """Whether two fingerprints are of the same tensor: equal bytes, or equal shape, RMS and sketch within `tolerance`."""
    if a.sha256 == b.sha256:
        return True
    if a.shape != b.shape or abs(a.rms - b.rms) > tolerance * max(a.rms, b.rms):
        return False
    return _alike(a.sketch, b.sketch, tolerance)


def _alike(a: Sequence[float], b: Sequence[float], tolerance: float) -> bool:
    return all(abs(x - y) <= tolerance * max(1.0, abs(x)) for x, y in zip(a, b, strict=True))


def _factor(reference: WeightPrint, candidate: WeightPrint, tolerance: float) -> float | None:
    """Return the number by which the reference's tensor must be multiplied to give the candidate's; None if there is none.

    Sketches do not depend on a tensor's size, so the sketches of a tensor and its multiple differ at most in sign.
    """
    if not reference.rms or not candidate.rms:
        return None
    for sign in (1.0, -1.0):
        if _alike(reference.sketch, [sign * x for x in candidate.sketch], tolerance):
            return sign * candidate.rms / reference.rms
    return None


def _added(reference: WeightPrint, candidate: WeightPrint, tolerance: float) -> float | None:
    """Return the number that must be added to each entry of the reference's vector to give the candidate's; None if none does.

    It can be computed from the sketches, because their inner products are linear in the tensor.
    """
    if len(reference.shape) != 1:
        return None
    ones = fingerprint("", torch.ones(reference.shape))
    own, other, one = (
        torch.tensor(item.sketch, dtype=torch.float64) * item.rms for item in (candidate, reference, ones)
    )
    added = float((own - other) @ one / (one @ one))
    rounding = tolerance * max(candidate.rms, reference.rms)
    is_all = float((own - other - added * one).abs().max()) <= rounding
    return added if is_all and rounding <= SURE * abs(added) * float(one.norm()) else None


def _relation(reference: WeightPrint, candidate: WeightPrint, tolerance: float) -> str:
    """Describe the number that turns the reference's tensor into the candidate's of the same shape; "" if there is none."""
    factor = _factor(reference, candidate, tolerance)
    if factor is not None:
        return f"the values are {factor:.6g} times its"
    added = _added(reference, candidate, tolerance)
    return "" if added is None else f"the values are its {'plus' if added > 0 else 'minus'} {abs(added):.4g}"


def _weight_finding(reference: WeightPrint, candidate: WeightPrint, how: str, tolerance: float) -> Finding:
    same_shape = reference.shape == candidate.shape
    said = (_relation(reference, candidate, tolerance) or how) if same_shape else "the shapes differ"
    return Finding(
        knob=KNOB, kind=KNOB, layers=_layers(reference.name), site=reference.name,
        reference_value=reference.rms if same_shape else list(reference.shape),
        candidate_value=candidate.rms if same_shape else list(candidate.shape),
        evidence={"tensor": reference.name, "differs_in": said, "reference_rms": reference.rms,
                  "candidate_rms": candidate.rms, "reference_sha256": reference.sha256,
                  "candidate_sha256": candidate.sha256},
        confidence=BY_COMPARISON, departs_from_spec="candidate",
        message=f"tensor {reference.name} of the candidate is not the reference's: {said}",
    )  # fmt: skip


def _layers(tensor: str) -> tuple[int, ...] | None:
    """Return the block of a tensor, read from the first number in its name; None if the name has no number."""
    number = next((part for part in tensor.split(".") if part.isdigit()), None)
    return None if number is None else (int(number),)


def length_gap(capture: TensorSource, about: Description) -> NotTested:
    """State the text length beyond which the audit tested nothing, and the port's own limit if it gives one."""
    longest = max((probe.length for probe in capture.probes if capture.sites(probe.name)), default=0)
    limit = about.max_positions
    says = f"; the port says that it is made for {limit} positions" if limit else ""
    why = f"the longest text that was run has {longest} tokens, and nothing is known beyond{says}"
    return NotTested(what=f"texts longer than {longest} tokens", why=why)


def config_warnings(spec_values: dict[str, KnobValue], effective: dict[str, KnobValue], side: str) -> list[str]:
    """Return one line per setting read from the loaded modules that differs from the spec: a hint, never a finding by itself."""
    return [
        f"{side}: live {knob} is {effective[knob]!r}, the spec says {spec_values[knob]!r}"
        for knob in sorted(spec_values.keys() & effective.keys())
        if not any(
            close(said, effective[knob]) for said in (spec_values[knob], values_where_present(spec_values[knob]))
        )
    ]


def values_where_present(said: KnobValue) -> KnobValue:
    """Drop the layers without a value (None) from a value per layer.

    Values read from live modules contain no entry for layers that lack the module.
    """
    return collapse_equal([one for one in said if one is not None]) if isinstance(said, list) else said


def close(a: KnobValue, b: KnobValue) -> bool:
    """Whether two values are equal, or numbers within 1e-5 relative (settings are often stored in float32), also per layer."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-5 * max(abs(a), abs(b))
    return a == b
