"""Answer a user's question about a model and backends: open the workspace, run every candidate, write, and clean up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parity_audit.capture.plan import AuditPlan, opened, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import EXIT_INTERRUPTED, ParityError, UsageError
from parity_audit.core.invariance_report import CandidateInvariance, Invariance, InvarianceReport
from parity_audit.core.progress import Progress
from parity_audit.core.types import BackendRef
from parity_audit.invariance.conditions import LONG, SUBJECT, Ids, Planner
from parity_audit.invariance.prefix import LENGTH, long_subject
from parity_audit.invariance.run import audit_candidate, measured_floor
from parity_audit.invariance.runs import Floors, Question
from parity_audit.invariance.verdict import exit_code
from parity_audit.report.environment import this_machine
from parity_audit.report.files import write_report

REPORT_NAME = "invariance.json"
BOUND, QUICK_BOUND = 33, 9
RUNS, QUICK_RUNS = 12, 4
NEW_TOKENS, QUICK_NEW_TOKENS = 24, 8
LARGEST_BOUND = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How much is run: the largest batch, and the number and length of the completions; None takes the default of `quick`."""

    quick: bool = False
    bound: int | None = None
    completions: int | None = None
    new_tokens: int | None = None

    def chosen(self) -> tuple[int, int, int]:
        """Return the size of the largest batch, the number of completions, and the number of tokens of each.

        Raises:
            UsageError: a number is too small to show anything, or the batch is larger than `LARGEST_BOUND`.
        """
        usual = (QUICK_BOUND, QUICK_RUNS, QUICK_NEW_TOKENS) if self.quick else (BOUND, RUNS, NEW_TOKENS)
        given = (self.bound, self.completions, self.new_tokens)
        bound, runs, tokens = (own if one is None else one for own, one in zip(usual, given, strict=True))
        if not 2 <= bound <= LARGEST_BOUND or runs < 2 or tokens < 1:
            raise UsageError(
                "sizes out of range", code="invariance-sizes", found=f"{bound} sequences, {runs} completions, {tokens} tokens",
                expected=f"2 to {LARGEST_BOUND} sequences, at least 2 completions of at least 1 token",
            )  # fmt: skip
        return bound, runs, tokens


def answer(
    model: str, *, candidates: Sequence[BackendRef], reference: BackendRef, out: Path | None, install: bool, timeout: float,
    progress: Progress, question: Mapping[str, object], options: Options,
) -> InvarianceReport:  # fmt: skip
    """Run the subject under every condition in every candidate, and report which conditions change its result.

    Writes invariance.json, .md, .txt and .html into the report's directory. `question` holds the arguments of `plan_audit`.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the noise floor could not be measured.
    """
    started = time.perf_counter()
    bound, _, _ = options.chosen()
    workspace, plan = opened(out, model, probes=["short"], progress=progress, **question)
    sessions: dict[str, Session] = {}

    def session(ref: BackendRef) -> Session:
        if str(ref) not in sessions:
            sessions[str(ref)] = _session(plan, ref, workspace, install, timeout, progress)
        return sessions[str(ref)]

    try:
        asked = _asked(plan, int(str(question["seed"])), options, workspace, progress)
        progress.update("judge", f"noise floor of {reference}")
        floor = measured_floor(session(reference), asked, asked.subject)
        long = None if asked.long_subject is None else measured_floor(session(reference), asked, asked.long_subject)
        found = []
        for ref, following in zip(candidates, (*candidates[1:], None), strict=True):
            for other in sessions.values():
                if other.label != str(ref) and other.is_loaded:
                    other.release()  # one model in memory at a time
            if following is not None:
                _prepare(session, following)
            found.append(_candidate(session, ref, asked, floor, long or {}))
    finally:
        for one in sessions.values():
            one.release()
        workspace.drop_working()
    report = InvarianceReport(
        model=plan.model.repo_id, dtype=plan.dtype, device=plan.device, reference=str(reference),
        weights=plan.checkpoint.in_reports,
        subject={"tokens": len(asked.subject), "token_ids": list(asked.subject), "seed": asked.seed, "largest_batch": bound},
        candidates=tuple(found), seconds={"total": time.perf_counter() - started}, exit_code=exit_code(found),
    )  # fmt: skip
    return _written(report, workspace.out)


def _asked(plan: AuditPlan, seed: int, options: Options, workspace: Workspace, progress: Progress) -> Question:
    """Return the complete question: the subjects, the sizes that the options choose, and the facts about model and machine."""
    bound, runs, tokens = options.chosen()
    subject, vocab, bos = subject_of(plan, seed), int(plan.config["vocab_size"]), plan.config.get("bos_token_id")
    long = long_subject(Planner(subject, vocab, bos, random.Random(seed)), plan.config.get("max_position_embeddings"))
    return Question(
        subject=subject, long_subject=None if options.quick else long, vocab=vocab,
        bos=bos, seed=seed, dtype=plan.dtype, bound=bound, threads=thread_counts(), completions=runs, new_tokens=tokens,
        quick=options.quick, folder=workspace.working / "invariance", progress=progress,
    )  # fmt: skip


def subject_of(plan: AuditPlan, seed: int) -> Ids:
    """Return the subject, the sequence whose result is compared: the beginning of the first probe.

    If that probe is shorter than the subject, tokens drawn from it are appended.
    """
    row = plan.probes[0].token_ids[0]
    draw = random.Random(seed)
    more = (draw.choice(row[1:] or row) for _ in range(SUBJECT))
    return (*row, *more)[:SUBJECT]


def thread_counts() -> tuple[int, ...]:
    """Return the numbers of threads to test: one, two, and all that this machine has."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return tuple(sorted({1, min(2, available), available}))


def _prepare(session: Callable[[BackendRef], Session], ref: BackendRef) -> None:
    """Start the next backend's process, which imports its engine in the background; an error is reported at its turn."""
    with contextlib.suppress(ParityError):
        session(ref).prepare()


def _candidate(
    session: Callable[[BackendRef], Session], ref: BackendRef, asked: Question, floor: Floors, long: Floors
) -> CandidateInvariance:
    """Return one candidate's result; if the candidate fails, that is its result, and other candidates are still run."""
    try:
        return audit_candidate(session(ref), asked, floor, long)
    except UsageError:
        raise
    except ParityError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise
        return CandidateInvariance(
            backend=str(ref),
            package="",
            version="",
            settings=dict(ref.settings),
            verdict=Invariance.ERROR,
            why=error.message,
            error=str(error),
            code=error.code,
        )


def _session(
    plan: AuditPlan, ref: BackendRef, workspace: Workspace, install: bool, timeout: float, progress: Progress
) -> Session:
    side = side_plan(plan, ref, install=install, progress=progress)
    return Session(
        plan=dataclasses.replace(side, max_positions=max(side.max_positions, LENGTH + LONG)), log=workspace.log(f"{ref}"),
        timeout=timeout, home=workspace.home(), progress=progress,
    )  # fmt: skip


def _written(report: InvarianceReport, out: Path) -> InvarianceReport:
    """Write the report, and return it with its path; raises NotJudged if the disk refuses it."""
    path = out / REPORT_NAME
    report = dataclasses.replace(report, environment={**this_machine(), "report": str(path)})
    write_report(report, out)
    return report
