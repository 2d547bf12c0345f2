"""Check that a capture may judge two others: it must be a true float64 run of the reference's weights and tokens.

Any other capture gives a wrong noise floor: with a float32 run every candidate's error looks like rounding, and with the
candidate's own run the candidate seems to have no error.
"""

from __future__ import annotations

from pathlib import Path

from parity_audit.capture.store import Capture
from parity_audit.core.errors import UsageError
from parity_audit.core.sites import LOGITS
from parity_audit.core.wire import FLOAT64

RETAKE = "take the reference with `parity-audit capture MODEL --judge --out REFERENCE`, which writes REFERENCE/judge"


def require_judge(judge: Capture, reference: Capture, candidate: Capture) -> None:
    """Raise unless the judge is a float64 run of the reference's checkpoint on the probes of both captures.

    Raises:
        UsageError: the judge is another kind of capture; the message names the difference.
        CaptureBroken: a file of the judge is missing, truncated or altered.
    """
    _is_a_third_capture(judge, reference, candidate)
    _ran_in_float64(judge)
    _has_the_weights_of(reference, judge)
    for probe in reference.probes:
        if probe.name in {other.name for other in candidate.probes}:
            _has_probe(judge, reference, probe.name)
            _holds_float64_numbers(judge, probe.name)


def _is_a_third_capture(judge: Capture, reference: Capture, candidate: Capture) -> None:
    for side, name in ((reference, "reference"), (candidate, "candidate")):
        same_folder = judge.folder.resolve() == side.folder.resolve()
        if same_folder or (judge.hashes and judge.hashes == side.hashes):
            raise _unfit(f"the judge is the {name} itself", judge.folder, found=str(side.folder))


def _ran_in_float64(judge: Capture) -> None:
    manifest = judge.manifest
    if manifest.precision != FLOAT64:
        found = f"a {manifest.precision} run in {manifest.dtype}"
        raise _unfit("the judge is not a true-float64 run", judge.folder, expected="precision float64", found=found)
    narrow = next((entry for entry in manifest.entries if entry.dtype != FLOAT64), None)
    if narrow is not None:
        raise _unfit(
            "the judge holds a tensor that is not float64", judge.folder, found=f"{narrow.file}: {narrow.dtype}"
        )


def _has_the_weights_of(reference: Capture, judge: Capture) -> None:
    ours, theirs = judge.manifest.checkpoint.fingerprint, reference.manifest.checkpoint.fingerprint
    if not ours or ours != theirs:
        raise _unfit(
            "the judge does not say that it ran the reference's checkpoint", judge.folder,
            expected=f"fingerprint {theirs or '(the reference has none)'}", found=f"fingerprint {ours or '(none)'}",
        )  # fmt: skip


def _has_probe(judge: Capture, reference: Capture, name: str) -> None:
    wanted = next(probe for probe in reference.probes if probe.name == name)
    found = next((probe for probe in judge.probes if probe.name == name), None)
    if found is None or LOGITS not in judge.sites(name):
        raise _unfit(f"the judge did not run probe `{name}`", judge.folder)
    if (found.token_ids, found.mask) != (wanted.token_ids, wanted.mask):
        raise _unfit(f"the judge ran probe `{name}` with other tokens than the reference", judge.folder)


def _holds_float64_numbers(judge: Capture, probe: str) -> None:
    """Raise if every logit is unchanged by a conversion to float32 and back, which shows that it was computed in float32."""
    logits = judge.tensor(probe, LOGITS)
    if bool((logits == logits.float().double()).all()):
        raise _unfit(
            f"every logit of probe `{probe}` is a float32 number: the judge was computed in float32", judge.folder
        )


def _unfit(message: str, folder: Path, *, expected: str = "", found: str = "") -> UsageError:
    return UsageError(message, code="unfit-judge", where=str(folder), expected=expected, found=found, hint=RETAKE)
