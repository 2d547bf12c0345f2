"""The stages as a list of calls. The command line and notebooks both start here.

resolve → pre-flight → capture → compare → localise → identify → repair → verify → report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parity_audit.audit.context import AuditContext
from parity_audit.audit.question import check_backends, check_options, check_weights_option, nothing_left
from parity_audit.audit.reference import FLOAT64_BACKENDS
from parity_audit.audit.run import run_audit
from parity_audit.audit.sequences import layer_findings
from parity_audit.cache.root import cache_root as cache_root
from parity_audit.capture.bounded import WHOLE
from parity_audit.capture.place import JUDGE_FOLDER, place, require_replaceable
from parity_audit.capture.plan import opened
from parity_audit.capture.scratch import Scratch
from parity_audit.capture.take import reusable_capture
from parity_audit.compare.divergence_check import Checked
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError
from parity_audit.core.inputs import accepting, path, several, torch_name
from parity_audit.core.invariance_report import InvarianceReport
from parity_audit.core.logprob_report import LogprobFinding, LogprobReport
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Report
from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.core.types import BackendRef
from parity_audit.core.wire import FLOAT64
from parity_audit.envs.build import default_candidates, list_envs, python_for
from parity_audit.envs.build import remove_env as remove_env
from parity_audit.envs.health import health
from parity_audit.envs.recipes import recipe_for, table
from parity_audit.invariance.question import Options
from parity_audit.invariance.question import answer as invariance_answer
from parity_audit.logprobs.attribution import parse_target
from parity_audit.logprobs.engines import bare_engine, served
from parity_audit.logprobs.question import answer
from parity_audit.logprobs.switches import engine_modes
from parity_audit.offline.diff import diff as diff
from parity_audit.offline.own_divergence import check_own_divergence
from parity_audit.offline.stored import prune as prune
from parity_audit.offline.stored import stored as stored
from parity_audit.report.files import failure_reported, read_report, set_aside
from parity_audit.report.notebook import with_bar
from parity_audit.specs.load import list_specs
from parity_audit.specs.schema import Spec
from parity_audit.specs.shown import ShownSpec as ShownSpec
from parity_audit.specs.shown import show_spec as show_spec
from parity_audit.workers.client import TIMEOUT
from parity_audit.workers.live import facts_of, lent

BackendLike = str | BackendRef
PathLike = str | Path


@accepting(
    weights=path, out=path, dtype=torch_name, device=torch_name, candidates=several, probes=several, prompt=several,
    prompts=path,
)  # fmt: skip
@with_bar
def audit(
    model: str,
    *,
    candidates: Sequence[BackendLike] | BackendLike | None = None,
    reference: BackendLike = "hf",
    miniature: str | None = None,
    seed: int = 0,
    weights: PathLike | None = None,
    dtype: object = "float32",
    device: object = "cpu",
    probes: Sequence[str] | str | None = None,
    prompt: Sequence[str] | str | None = None,
    prompts: PathLike | None = None,
    chat: bool = False,
    target: float = 1e-5,
    repair: bool = True,
    hooks: bool = False,
    out: PathLike | None = None,
    install: bool = True,
    tf32: bool = False,
    accept_patched: bool = False,
    match_reference: bool = False,
    limits: bool = True,
    quick: bool = False,
    disk: int | None = None,
    baseline: PathLike | None = None,
    captures: PathLike | None = None,
    timeout: float = TIMEOUT,
    progress: Progress = SILENT,
) -> Report:
    """Run the same tokens through every backend, say which agree, why the others do not, and what repairs them.

    Args:
        model: hub id, alias or local path.
        candidates: one or several BACKEND strings; every candidate that can run here when None.
        reference: the backend that is believed.
        miniature: "mini", "small" or "full" for seeded weights with the architecture's real constants.
        dtype: float32, bfloat16 or float16, or that dtype of torch.
        prompt: texts of your own, run beside the probes; `prompts` is a file of texts, chat messages or token ids, `chat` puts
            those that are text through the checkpoint's chat template.
        hooks: also edit every hook, and compare with the same edit in the reference.
        target: max-abs logit difference that a repaired candidate should reach.
        install: allow creating environments.
        match_reference: where the reference departs from the spec, patch candidates to do what it does. Otherwise a
            right reference is proposed, and candidates are patched against that.
        limits: measure the smallest errors that this run could have seen; without them a verdict comes sooner.
        quick: one short probe, causes but no repair, no detection limits: the time of a load and a short run per side.
        disk: bytes that captures may take on disk; what is left out to keep within them is listed in the report.
        baseline: report.json of an earlier audit; the exit code is 1 where a figure left its band, 3 where the question changed.
        captures: a folder of finished captures; those with the key of one that this audit needs are not taken again.
        timeout: seconds that a worker may take for one request.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the reference could not be captured, so nothing can be said about anybody.
    """
    if out is not None:
        set_aside(out)
    with failure_reported(model, out):
        check_options(dtype=dtype, device=device, seed=seed, timeout=timeout, target=target)
        check_weights_option(weights, miniature)
        earlier = None if baseline is None else read_report(Path(baseline))
        believed, refs = _ref(reference), _candidates(candidates, device, install)
        recipe_for(believed, device)
        workspace, plan = opened(
            out, model, given=None if captures is None else Path(captures), synthetic=miniature, seed=seed, weights=weights,
            probes=probes, dtype=dtype, device=device, texts=prompt or (), prompts=prompts, chat=chat, quick=quick,
            disk=disk, repair=repair, definition=believed.name not in FLOAT64_BACKENDS, progress=progress,
        )  # fmt: skip
    context = AuditContext(
        plan=plan, workspace=workspace, install=install, tf32=tf32, target=target, repair=repair, hooks=hooks,
        timeout=timeout, progress=progress, match_reference=match_reference, limits=limits, quick=quick,
        scratch=Scratch.of(workspace.working, disk),
    )  # fmt: skip
    with failure_reported(model, workspace.out), nothing_left(workspace):
        check_backends([believed, *refs], plan.config)
        return run_audit(context, believed, refs, accept_patched=accept_patched, baseline=earlier)


def audit_live(model: Any, name: str, **question: Any) -> Report:
    """Audit a model that this process has loaded: as the only candidate, run where it is, and left as it was.

    Args:
        model: what transformers, TransformerLens or nnsight returned (also compiled, or with adapters), or any `nn.Module`
            with `sites=FILE`, its site map.
        name: hub id, alias or local path of what it is a port of; the reference has its weights, or those of `weights=DIR`.
        question: as of `audit`, without candidates; dtype and device are those of the model.

    Raises:
        UsageError, NotJudged: as `audit`; or `model` is no model.
    """
    sites = question.pop("sites", None)
    about = facts_of(model)
    with lent(model, **({} if sites is None else {"sites": str(sites)})) as candidate:
        return audit(name, candidates=candidate, **{**about, **question})


@accepting(weights=path, out=path, dtype=torch_name, device=torch_name, probes=several, prompt=several, prompts=path)
@with_bar
def capture(
    model: str,
    backend: BackendLike,
    *,
    out: PathLike,
    miniature: str | None = None,
    seed: int = 0,
    weights: PathLike | None = None,
    dtype: object = "float32",
    device: object = "cpu",
    probes: Sequence[str] | str | None = None,
    prompt: Sequence[str] | str | None = None,
    prompts: PathLike | None = None,
    chat: bool = False,
    install: bool = True,
    tf32: bool = False,
    judge: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = SILENT,
) -> Path:
    """Capture one backend into `out`; with `judge`, its true-float64 run into `out/judge` as well.

    A capture that is there already is replaced whole, its `judge` with it, or left as it is when this one fails.

    Raises:
        UsageError: the question is malformed, or `out` holds files that are no capture's.
        NotJudged: the backend failed.
    """
    check_options(dtype=dtype, device=device, seed=seed, timeout=timeout)
    check_weights_option(weights, miniature)
    ref = _ref(backend)
    recipe_for(ref, device)
    require_replaceable(out)
    workspace, plan = opened(
        out, model, synthetic=miniature, seed=seed, weights=weights, probes=probes, dtype=dtype, device=device,
        texts=prompt or (), prompts=prompts, chat=chat, disk=WHOLE, progress=progress,
    )  # fmt: skip
    context = AuditContext(
        plan=plan, workspace=workspace, install=install, tf32=tf32, target=0.0, repair=False, hooks=False,
        timeout=timeout, progress=progress,
    )  # fmt: skip
    with nothing_left(workspace):
        check_backends([ref], plan.config)
        session = context.session(ref, "capture")
    try:
        with plan.guard.watched(session.label):
            taken = {"": reusable_capture(session, plan.probes, workspace.captures, with_weights=True)}
            if judge:
                taken[JUDGE_FOLDER] = reusable_capture(session, plan.probes, workspace.captures, precision=FLOAT64)
        place(taken, out)
    finally:
        session.release()
        workspace.drop_working()
    workspace.drop(list(taken.values()))
    return out


@accepting(
    weights=path, out=path, prompts=path, rollouts=path, dtype=torch_name, device=torch_name, presets=several, exports=several,
)  # fmt: skip
@with_bar
def logprobs(
    model: str,
    *,
    engine: BackendLike | None = None,
    engine_url: str | None = None,
    trainer: BackendLike = "hf",
    sampling: Sampling | None = None,
    prompts: PathLike | None = None,
    rollouts: PathLike | None = None,
    memory_bytes: int = 2 << 30,
    presets: Sequence[str] | str | None = None,
    miniature: str | None = None,
    seed: int = 0,
    weights: PathLike | None = None,
    dtype: object = "float32",
    device: object = "cpu",
    out: PathLike | None = None,
    install: bool = True,
    explain: bool = False,
    chat: bool = False,
    exports: Sequence[str] | str = (),
    engine_mode: str | None = None,
    prefix_cache: bool | None = None,
    attribute: bool = False,
    target: float | str | None = None,
    timeout: float = TIMEOUT,
    progress: Progress = SILENT,
) -> LogprobReport:
    """Do the log-probabilities of an engine agree with a trainer's, on tokens that the engine draws?

    Args:
        engine: the BACKEND that samples and scores prompts (`vllm` or `sglang`; `vllm` when None).
        engine_url: the address of a server that runs already, vLLM's or SGLang's, which is asked instead.
        trainer: the BACKEND that scores by teacher forcing, natively and in true float64 (`hf`).
        sampling: temperature, truncation, number and length of the completions.
        prompts: a .txt or .jsonl file; built prompts when None.
        rollouts: a .jsonl or .parquet file of a training framework, judged instead of an engine.
        memory_bytes: bound of the logits that the trainer's side holds at a time.
        presets: frameworks whose own metric names are wanted; all when None.
        timeout: seconds that a worker may take for one request.
        chat: put prompts that are text through the checkpoint's chat template.
        exports: further files: xlsx, parquet, svg, png.
        engine_mode: "eager" or "compiled" (vLLM's inductor, no other engine has one); compared with the other on the same tokens.
        prefix_cache: on or off; compared with the other on the same tokens, and proved by the engine's counter.
        attribute: flip every switch of both sides on the same tokens, and say what share of the squared error each explains.
        target: what a proposed set of switches should reach: a share (0.8), or "rmse=0.001" in nats. Given, it asks for
            the attribution too.
        explain: where a leg of the engine departs, audit its layers on the sequences that disagree most.

    Raises:
        UsageError: the question is malformed.
        NotJudged: a leg failed, or there are too few tokens.
    """
    question: dict[str, Any] = {
        "synthetic": miniature, "seed": seed, "weights": weights, "dtype": dtype, "device": device,
    }  # fmt: skip

    def layers(folder: Path, completions: Sequence[Completion]) -> Sequence[LogprobFinding]:
        workspace, plan = opened(folder, model, probes=None, progress=progress, **question)
        context = AuditContext(
            plan=plan, workspace=workspace, install=install, tf32=False, target=0.0, repair=False, hooks=False,
            timeout=timeout, progress=progress,
        )  # fmt: skip
        return layer_findings(context, _ref(trainer), bare_engine(own), completions)

    wanted = None if engine is None else _ref(engine)
    modes = engine_modes("vllm" if wanted is None else wanted.name, engine_mode, prefix_cache)
    own = served(engine_url, wanted, restarts=bool(modes or attribute or target is not None or explain)) if engine_url else (
        wanted or _ref("vllm")
    )  # fmt: skip
    return answer(
        model, engine=replace(own, settings={**own.settings, **modes}), trainer=_ref(trainer),
        sampling=sampling or Sampling(seed=seed), prompts=prompts,
        rollouts=rollouts, memory_bytes=memory_bytes, presets=presets, out=out, install=install, timeout=timeout,
        progress=progress, question=question, layers=layers if explain else None,
        target=None if target is None and not attribute else parse_target(target),
        asked=tuple(modes), exports=exports, chat=chat,
    )  # fmt: skip


@accepting(weights=path, out=path, dtype=torch_name, device=torch_name, candidates=several)
@with_bar
def invariance(
    model: str,
    *,
    candidates: Sequence[BackendLike] | BackendLike | None = None,
    reference: BackendLike = "hf",
    quick: bool = False,
    max_batch: int | None = None,
    completions: int | None = None,
    new_tokens: int | None = None,
    miniature: str | None = None,
    seed: int = 0,
    weights: PathLike | None = None,
    dtype: object = "float32",
    device: object = "cpu",
    out: PathLike | None = None,
    install: bool = True,
    timeout: float = TIMEOUT,
    progress: Progress = SILENT,
) -> InvarianceReport:
    """Does an engine's answer depend on its batch, its cache, its chunks or its threads, and by how much?

    Args:
        candidates: one or several BACKEND strings; every candidate that can run here when None.
        reference: the backend whose run in true float64 measures the noise floor (`hf`).
        quick: batches of up to 9, few completions, no second process.
        max_batch: sequences of the largest batch.
        completions: greedy completions under changing load, `new_tokens` tokens each.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the noise floor could not be measured.
    """
    check_options(dtype=str(dtype), device=str(device), seed=seed, timeout=timeout)
    options = Options(quick=quick, bound=max_batch, completions=completions, new_tokens=new_tokens)
    believed, refs = _ref(reference), _candidates(candidates, str(device), install)
    return invariance_answer(
        model, candidates=refs, reference=believed, out=out, install=install, timeout=timeout, progress=progress,
        question={"synthetic": miniature, "seed": seed, "weights": weights, "dtype": dtype, "device": device}, options=options,
    )  # fmt: skip


def check_divergence(target: str) -> Checked:
    """What a user's own divergence function (`FILE:FUNCTION`) computes. Raises UsageError or NotJudged."""
    return check_own_divergence(target)


def _ref(backend: BackendLike) -> BackendRef:
    return backend if isinstance(backend, BackendRef) else parse_backend(backend)


def _candidates(wanted: Sequence[BackendLike] | None, device: str, install: bool) -> list[BackendRef]:
    refs = [_ref(item) for item in wanted] if wanted else default_candidates(device, install=install)
    if not refs:
        hint = "run `parity-audit doctor`, or name one with --candidate"
        raise UsageError("no candidate can run here", code="no-candidate", hint=hint)
    for ref in refs:
        recipe_for(ref, device)  # a malformed version is refused before anything is run
    return refs


def specs() -> tuple[Spec, ...]:
    """Every shipped spec."""
    return list_specs()


def envs() -> list[tuple[str, str, int]]:
    """(key, backend, bytes) of every environment on disk."""
    return list_envs()


def tested_releases() -> list[tuple[str, list[str]]]:
    """Releases with a tested recipe, by backend."""
    return [(name, entry["known"]) for name, entry in table()["backends"].items()]


def create_env(backend: BackendLike, *, device: str = "cpu", progress: Progress = SILENT) -> str:
    """Make the environment of a backend; returns its interpreter. Raises EnvFailed."""
    return python_for(_ref(backend), device=device, progress=progress).python


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of `doctor`."""

    name: str
    ok: bool
    why: str


def doctor() -> list[Check]:
    """What can run here, and why not."""
    return [Check(name=name, ok=ok, why=why) for name, ok, why in health()]
