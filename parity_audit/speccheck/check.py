"""Checks a spec against the programs that it describes.

Each backend must agree with the reference, except for errors that the spec lists. The spec's formulas must reproduce every component
of the reference. Constants whose change no probe shows are listed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parity_audit.api import audit
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import ParityError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Candidate, Report, Verdict
from parity_audit.core.types import BackendRef
from parity_audit.envs.build import default_candidates
from parity_audit.envs.recipes import backend_key, recipe_for
from parity_audit.selftest.corpus import load_corpus
from parity_audit.selftest.run import run_corpus
from parity_audit.speccheck.constants import Contradiction, contradictions
from parity_audit.speccheck.judged import judged_components
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import reason_not_supported, section

OK, KNOWN, FAILED, NOT_RUN = "ok", "known error", "failed", "not run"
AGREES = (Verdict.EXACT, Verdict.PARITY)
UNSEEN, SELF_CHECK = "detection limit of ", "self-check: "


@dataclass(frozen=True, kw_only=True)
class PairCheck:
    """The result of one architecture on one backend.

    - `status`: `OK`, `KNOWN`, `FAILED` or `NOT_RUN`. `KNOWN` means that the backend has exactly the errors that the spec lists.
    - `why`: the reason for any status but `OK`, which has none.
    - `hidden`: sites that the backend does not show.
    - `error`: the code of the error that ended the run.
    """

    architecture: str
    model: str
    backend: str
    version: str
    status: str
    verdict: str = ""
    why: str = ""
    hidden: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class SpecCheck:
    """The result of one spec.

    - `pairs`: the result of each backend, the reference first.
    - `not_excited`: constants whose change no probe of the miniature shows.
    - `planted`: the number of planted errors. `missed`: the planted errors that were not detected or not named.
    - `components`: the number of components of the reference that were compared with the spec's formulas.
    - `contradicted`: constants of the spec that the reference contradicts.
    """

    spec: str
    architecture: str
    model: str
    pairs: tuple[PairCheck, ...]
    not_excited: tuple[str, ...] = ()
    planted: int = 0
    missed: tuple[str, ...] = ()
    components: int = 0
    contradicted: tuple[Contradiction, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether at least one backend ran, every backend that ran agrees or has only the errors that the spec lists, every planted
        error was named, and the spec's formulas reproduce every component of the reference."""
        ran = [pair for pair in self.pairs if pair.status != NOT_RUN]
        agree = bool(ran) and all(pair.status in (OK, KNOWN) for pair in ran)
        return agree and not self.missed and self.components > 0 and not self.contradicted


def check_spec(
    spec: Spec, backends: Sequence[str] | None, *, faults: bool, seed: int = 0, dtype: str = "float32", install: bool = True,
    progress: Progress = SILENT,
) -> SpecCheck:  # fmt: skip
    """Check one spec on the miniature of its first model.

    Args:
        backends: BACKEND strings; None for every candidate that can run here.
        dtype: the dtype of the reference and of the backends; some backends compute an architecture in one dtype only.
        faults: whether also to plant the model's errors from the corpus, and to check that they are detected and named.

    Raises:
        ParityError: the reference does not run, so no backend can be compared.
    """
    model = spec.first_model
    able, barred = able_backends(spec, backends, install=install, dtype=dtype)
    asked = able or [BackendRef(name="hf")]
    with tempfile.TemporaryDirectory() as out:
        report = audit(
            model, candidates=asked, miniature="mini", seed=seed, dtype=dtype, repair=False, install=install, out=Path(out),
            progress=progress,
        )  # fmt: skip
    pairs = [_reference(spec, model, report)]
    pairs += [pair_check(spec, model, ref, found) for ref, found in zip(asked, report.candidates, strict=True)]
    pairs += [
        PairCheck(architecture=spec.architecture, model=model, backend=name, version="", status=NOT_RUN, why=why)
        for name, why in barred.items()
    ]
    compared, contradicted = _proved(spec, seed, progress)
    planted, missed = _planted(model, seed, progress) if faults else (0, ())
    return SpecCheck(
        spec=spec.name, architecture=spec.architecture, model=model, pairs=tuple(pairs),
        not_excited=_not_excited(report), planted=planted, missed=missed,
        components=compared, contradicted=contradicted,
    )  # fmt: skip


def able_backends(
    spec: Spec, backends: Sequence[str] | None, *, install: bool, dtype: str = "float32"
) -> tuple[list[BackendRef], dict[str, str]]:
    """Return the backends that can run a spec, and for each of the others the reason why it cannot.

    If `backends` is None, every candidate that can run here is considered.
    """
    refs = [parse_backend(name) for name in backends] if backends else default_candidates("cpu", install=install)
    barred = {str(ref): why for ref in refs if (why := _cannot(spec, ref, dtype))}
    return [ref for ref in refs if str(ref) not in barred], barred


def _cannot(spec: Spec, ref: BackendRef, dtype: str) -> str:
    """Return why this release cannot run the text model alone on a CPU, by what the spec says of it, or "" if it can.

    Miniatures are text models and run on a CPU.
    """
    release = _release(ref)
    key = backend_key(ref, release)
    return (
        reason_not_supported(spec, key, release, {}, dtype=dtype)
        if key in spec.content.backends
        else "the spec has no section for it"
    )


def _release(ref: BackendRef) -> str:
    return ref.version or recipe_for(ref, "cpu").version


def _reference(spec: Spec, model: str, report: Report) -> PairCheck:
    """Return the result of the reference: it passes if a float64 judge ran and its self-check reports nothing but known errors."""
    side = report.reference
    assert side is not None  # A report always has a reference.
    notes = list(side.self_check) if report.judge else [*side.self_check, "no judge ran in float64"]
    listed = _known(spec, BackendRef(name=side.backend, version=side.version))
    known = {words.removeprefix(SELF_CHECK): why for words, why in listed.items() if words.startswith(SELF_CHECK)}
    seen = {next((words for words in known if words in note), note): note for note in notes}
    status, why = judged(seen, known, agrees=not notes)
    return PairCheck(
        architecture=spec.architecture, model=model, backend=side.backend, version=side.version, status=status,
        verdict="reference", why=why,
    )  # fmt: skip


def pair_check(spec: Spec, model: str, ref: BackendRef, found: Candidate) -> PairCheck:
    """Return the result of a candidate, compared with the known errors that the spec lists for its backend."""
    listed = _known(spec, replace(ref, version=found.version or _release(ref)))
    known = {knob: why for knob, why in listed.items() if not knob.startswith(SELF_CHECK)}
    seen = {finding.knob: finding.message for finding in found.findings}
    status, why = judged(seen, known, agrees=found.verdict in AGREES and not seen, said=found.why)
    hidden = sorted({item.site.split(".", 2)[-1] for item in found.not_visible})
    return PairCheck(
        architecture=spec.architecture, model=model, backend=found.backend, version=found.version,
        status=status, verdict=found.verdict.value, why=why, hidden=tuple(hidden),
        error=str((found.error or {}).get("code", "")),
    )  # fmt: skip


def _known(spec: Spec, ref: BackendRef) -> dict[str, str]:
    release = _release(ref)
    return {what: why or "" for what, why in section(spec, backend_key(ref, release), release).known.items()}


def judged(seen: Mapping[str, str], known: Mapping[str, str], *, agrees: bool, said: str = "") -> tuple[str, str]:
    """Return (status, why) for the errors that were found, compared with the known errors that the spec lists.

    A known error that is no longer found also fails the check, because what a spec says of a backend has to stay true.

    Args:
        seen: the message of each error that was found, by knob.
        known: the cause of each known error, by knob.
        agrees: whether the backend agrees with the reference.
        said: the reason that the audit itself gives for its verdict.
    """
    gone = ", ".join(what for what in known if what not in seen)
    lost = f"known, but not found: {gone}" if gone else ""
    if agrees:
        return (FAILED, lost) if gone else (OK, "")
    if seen and set(seen) == set(known):
        return KNOWN, "; ".join(f"{message}: {known[what]}" for what, message in seen.items())
    return FAILED, "; ".join(filter(None, (lost, said, *seen.values())))


def _not_excited(report: Report) -> tuple[str, ...]:
    """Return the constants that were changed in a running model without any effect on the probes.

    Constants that have no setting in a running model are left out, because they say nothing about the spec.
    """
    gaps = [gap for found in report.candidates for gap in found.not_tested]
    return tuple(sorted({gap.what.removeprefix(UNSEEN) for gap in gaps
                         if gap.what.startswith(UNSEEN) and gap.why.startswith("not excited")}))  # fmt: skip


def _proved(spec: Spec, seed: int, progress: Progress) -> tuple[int, tuple[Contradiction, ...]]:
    """Return how many components of the reference were compared with the formulas, and the contradicted constants."""
    with judged_components(spec, seed, progress) as (residuals, components):
        found = contradictions(residuals, components, residuals.decoder.values)
    return len(components), tuple(found)


def _planted(model: str, seed: int, progress: Progress) -> tuple[int, tuple[str, ...]]:
    """Return how many errors were planted in this model, and those that were not detected or not named or that ended in an error.

    A model for which the corpus has no faults gives (0, ()).
    """
    try:
        corpus = load_corpus([model])
    except ParityError:
        return 0, ()
    scores = run_corpus(corpus, repair=False, seed=seed, progress=progress).scores
    missed = [score.id for score in scores if not score.detected or score.named is False or score.error]
    return corpus.size, tuple(missed)
