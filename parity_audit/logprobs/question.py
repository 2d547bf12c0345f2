"""Answer a user's question about a model, an engine, a trainer and prompts: open the workspace, run, write, and clean up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parity_audit.capture.plan import AuditPlan, opened, side_plan
from parity_audit.capture.prompts import read_prompts
from parity_audit.capture.session import Session, SidePlan
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import ELSEWHERE, UsageError, refusals_of_the_disk
from parity_audit.core.logprob_report import LogprobFinding, LogprobReport
from parity_audit.core.progress import Progress
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.core.types import BackendRef
from parity_audit.envs.recipes import SERVED
from parity_audit.logprobs.attribution import Target
from parity_audit.logprobs.context import Context
from parity_audit.logprobs.files.export import check_exports, export
from parity_audit.logprobs.files.rollouts import Rollouts, read_rollouts
from parity_audit.logprobs.files.writing import write_tokens
from parity_audit.logprobs.profiles import PROFILES, profile
from parity_audit.logprobs.prompts import Prompts, built, generation_defaults, special_tokens
from parity_audit.logprobs.run import Answer, run
from parity_audit.logprobs.switches import PREFIX_CACHE, own_steps
from parity_audit.logprobs.texts import round_trip, with_text
from parity_audit.report.environment import this_machine
from parity_audit.report.files import write_report

ENGINES = ("vllm", "sglang", SERVED)
ROLLOUTS = {"sglang": "sglang_server"}
"""Engines whose completions are produced by another implementation (backend key) than their activations."""
TRAINERS = ("hf",)
REPORT_NAME = "logprobs.json"
LAYERS = "layers"
"""The folder into which the layer audit of the worst sequences writes its own report."""

LayerAudit = Callable[[Path, Sequence[Completion]], Sequence[LogprobFinding]]


def answer(
    model: str, *, engine: BackendRef, trainer: BackendRef, sampling: Sampling, prompts: Path | None,
    rollouts: Path | None, memory_bytes: int, presets: Sequence[str] | None, out: Path | None, install: bool,
    timeout: float, progress: Progress,
    question: Mapping[str, object], layers: LayerAudit | None = None, target: Target | None = None,
    asked: Sequence[str] = (), exports: Sequence[str] = (), chat: bool = False,
) -> LogprobReport:  # fmt: skip
    """Sample with the engine (or read a rollout file), score with the trainer, and report whether they agree.

    Writes logprobs.json, .md, .txt and .html, tokens.jsonl and tokens.csv into the report's directory.

    `question` holds the arguments of `plan_audit`: synthetic, seed, weights, dtype, device. `layers`, if given, audits the
    layers on the worst sequences if a leg departs and an engine was sampled. With a `target` every switch of both sides is
    flipped on the same tokens.

    Raises:
        UsageError: the engine cannot sample, the trainer cannot score, or a preset or the prompt file does not exist.
        NotJudged: a leg failed.
    """
    _check(engine, trainer, sampling)
    kinds = check_exports(exports)
    if chat and prompts is None:
        raise UsageError("--chat needs --prompts: built prompts are token ids, not messages", code="prompts")
    settings, base = own_steps(trainer.settings)
    names = tuple(PROFILES) if presets is None else tuple(presets)
    for name in names:
        profile(name)
    given = None if rollouts is None else read_rollouts(rollouts)
    workspace, plan = opened(out, model, probes=None, progress=progress, **question)
    special = special_tokens(plan.checkpoint, plan.config)
    sessions: list[Session] = []
    try:
        chosen: Prompts = ()
        if given is None:
            chosen = (
                read_prompts(prompts, plan.checkpoint)
                if prompts
                else built(plan.config, special, seed=sampling.seed, cached=target is not None or PREFIX_CACHE in asked)
            )
        longest = _longest(chosen, given, sampling, plan)
        sides = [
            ("trainer", dataclasses.replace(trainer, settings=settings)),
            *([("engine", engine)] if given is None else []),
        ]
        for role, ref in sides:
            sessions.append(
                _session(
                    role,
                    side_plan(plan, ref, install=install, progress=progress),
                    workspace,
                    longest,
                    timeout,
                    progress,
                )
            )
        found = run(
            Context(
                plan=plan, engine=sessions[1] if given is None else None, trainer=sessions[0], sampling=sampling,
                prompts=chosen, special=special, defaults=generation_defaults(plan.checkpoint), memory_bytes=memory_bytes,
                presets=names, progress=progress, rollouts=given, base=base, target=target,
                asked=tuple(asked) if given is None else (),
                round_trip=round_trip(plan.checkpoint),
            )
        )  # fmt: skip
        # The tokenizer is in the backends' copy of the checkpoint, which is deleted with the working files below.
        in_text = with_text(found.report, found.completions, plan.checkpoint)
        found = dataclasses.replace(found, report=in_text)
    finally:
        for session in sessions:
            session.release()
        workspace.drop_working()
    if layers is not None and found.report.odd_leg is not None and given is None:
        deeper = layers(workspace.out / LAYERS, found.worst)
        report = dataclasses.replace(found.report, findings=merged(found.report.findings, deeper))
        found = dataclasses.replace(found, report=report)
    return _written(found, workspace.out, kinds)


def merged(first: Sequence[LogprobFinding], deeper: Sequence[LogprobFinding]) -> tuple[LogprobFinding, ...]:
    """Return both lists of findings, without "unexplained" ones of the first if the layer audit names a cause."""
    named = any(finding.name != "unexplained" for finding in deeper)
    return (*(finding for finding in first if finding.name != "unexplained" or not named), *deeper)


def _written(found: Answer, out: Path, kinds: Sequence[str]) -> LogprobReport:
    """Write the report and its tokens, and return it with its path; raises NotJudged if the disk refuses the files."""
    path = out / REPORT_NAME
    report = dataclasses.replace(found.report, environment={**this_machine(), "report": str(path)})
    with refusals_of_the_disk("write the report", out, ELSEWHERE):
        write_report(report, out, found.tokens)
        write_tokens(found.tokens, out)
        export(report, found.tokens, out, kinds)
    return report


def _check(engine: BackendRef, trainer: BackendRef, sampling: Sampling) -> None:
    for ref, known, what in ((engine, ENGINES, "--engine"), (trainer, TRAINERS, "--trainer")):
        if ref.name not in known:
            raise UsageError(f"{what} {ref.name} cannot be asked", code="unknown-backend", expected=", ".join(known))
    bounds = (sampling.temperature >= 0, 0 < sampling.top_p <= 1, sampling.top_k >= 0, sampling.samples >= 1)
    if not all(bounds) or sampling.max_new_tokens < 1:
        raise UsageError(
            "sampling settings out of range", code="sampling", found=json.dumps(dataclasses.asdict(sampling)),
            expected="temperature >= 0, 0 < top_p <= 1, top_k >= 0, samples >= 1, max_new_tokens >= 1",
        )  # fmt: skip


def _longest(prompts: Prompts, given: Rollouts | None, sampling: Sampling, plan: AuditPlan) -> int:
    """Return the number of tokens of the longest sequence; raises UsageError if the model has fewer positions."""
    if given is None:
        longest = max(len(ids) for ids in prompts) + sampling.max_new_tokens
    else:
        longest = max(len(one.prompt_ids) + len(one.token_ids) for one in given.completions)
    limit = plan.config.get("max_position_embeddings")
    if limit is not None and longest > int(limit):
        raise UsageError(
            f"a prompt and its completion take {longest} positions, the model has {limit}", code="too-long",
            hint="shorter prompts, or a smaller --max-new-tokens",
        )  # fmt: skip
    return longest


def _session(
    role: str, side: SidePlan, workspace: Workspace, longest: int, timeout: float, progress: Progress
) -> Session:
    """Return a session with room for the longest sequence.

    It runs in an empty directory: engines load a model by name, and would load a folder of that name in its place.
    """
    own = side.environment
    environment = dataclasses.replace(own, backend_key=ROLLOUTS.get(own.backend_key, own.backend_key))
    return Session(
        plan=dataclasses.replace(side, environment=environment, max_positions=longest + 1), log=workspace.log(f"{role}-{side.ref}"),
        timeout=timeout, home=workspace.home(), progress=progress,
    )  # fmt: skip
