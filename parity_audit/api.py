"""The public functions. The command line and notebooks both call them. The stages of an audit are:

resolve → pre-flight → capture → compare → localise → identify → repair → verify → report.
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
    """Run the same tokens through every backend; report which agree, why the others do not, and what repairs them.

    Args:
        model: hub id, alias or local path.
        candidates: one or several BACKEND strings; when None, those of TransformerLens and vLLM that can run here.
        reference: the backend with which every candidate is compared.
        miniature: "mini", "small" or "full": seeded random weights of that size, with the architecture's real constants.
        dtype: "float32", "bfloat16" or "float16", or the dtype of torch.
        prompt: your own texts, run in addition to the probes. `prompts` is a file of texts, chat messages or token ids.
            `chat` puts those that are text through the checkpoint's chat template.
        hooks: also edit the value at every hook, and compare the effect with that of the same edit in the reference.
        target: the max-abs logit difference that a patched candidate should reach.
        install: whether environments of backends may be created.
        match_reference: if the reference departs from the spec, patch candidates to do the same as the reference.
            Otherwise the report proposes a correct reference, and candidates are patched against that.
        limits: measure the smallest errors that this run could have detected; without this, the verdict comes sooner.
        quick: one short probe, causes but no repair and no detection limits: takes one load and one short run per side.
        disk: bytes that captures may take on disk; the report lists what is left out to stay within this bound.
        baseline: report.json of an earlier audit; exit code 1: a verdict changed or a figure left its band, 3: other question.
        captures: a folder of finished captures; one that has the key of a capture that this audit needs is used for it.
        timeout: seconds that a worker may take for one request.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the reference could not be captured, so no candidate can be judged.
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
    """Audit a model that this process has loaded, as the only candidate. It runs in this process and is not changed.

    Args:
        model: what transformers, TransformerLens or nnsight returned (also compiled, or with adapters), or any `nn.Module`
            with `sites=FILE`, its site map.
        name: hub id, alias or local path of the original model; the reference loads its weights, or those in `weights=DIR`.
        question: the arguments of `audit` except candidates; dtype and device default to those of `model`.

    Raises:
        UsageError, NotJudged: as for `audit`; UsageError also if `model` is not a model.
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
    """Capture one backend into `out`; with `judge`, also its run in true float64 into `out/judge`.

    An earlier capture in `out` is replaced completely, including its `judge`; if this capture fails, it stays unchanged.

    Raises:
        UsageError: the question is malformed, or `out` contains files that do not belong to a capture.
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
    """Compare the log-probabilities of an engine with those of a trainer, on tokens that the engine samples.

    Args:
        engine: the BACKEND that samples and scores prompts (`vllm` or `sglang`; `vllm` when None).
        engine_url: the address of a running vLLM or SGLang server, which is used in place of a new engine.
        trainer: the BACKEND that scores by teacher forcing, natively and in true float64 (`hf`).
        sampling: temperature, truncation, number and length of the completions.
        prompts: a .txt or .jsonl file; prompts of randomly drawn token ids when None.
        rollouts: a .jsonl or .parquet file of a training framework, which is judged in place of an engine.
        memory_bytes: the most bytes of logits that the trainer keeps in memory at a time.
        presets: frameworks under whose own names the metrics are also reported; all when None.
        timeout: seconds that a worker may take for one request.
        chat: put prompts that are text through the checkpoint's chat template.
        exports: formats of additional files: xlsx, parquet, svg, png.
        engine_mode: "eager" or "compiled" (vLLM's inductor only); it is compared with the opposite mode on the same tokens.
        prefix_cache: on or off; compared with the opposite on the same tokens, and confirmed by the engine's counter.
        attribute: change each switch of both sides on the same tokens; report the share of the squared error it explains.
        target: the goal of a proposed set of switches: a share (0.8), or "rmse=0.001" in nats. If it is given, the
            attribution runs even without `attribute`.
        explain: if a leg of the engine departs, audit its layers on the sequences that disagree most.

    Raises:
        UsageError: the question is malformed.
        NotJudged: a leg could not be run, or there are too few tokens.
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
    """Measure how much an engine's answer depends on its batch, its cache, its prefill chunks and its threads.

    Args:
        candidates: one or several BACKEND strings; when None, those of TransformerLens and vLLM that can run here.
        reference: the backend whose run in true float64 measures the noise floor (`hf`).
        quick: batches of up to 9 sequences, few completions, no second process.
        max_batch: the number of sequences in the largest batch.
        completions: the number of greedy completions under changing load, of `new_tokens` tokens each.

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
    """Return what a user's own divergence function (`FILE:FUNCTION`) computes. Raises UsageError or NotJudged."""
    return check_own_divergence(target)


def _ref(backend: BackendLike) -> BackendRef:
    return backend if isinstance(backend, BackendRef) else parse_backend(backend)


def _candidates(wanted: Sequence[BackendLike] | None, device: str, install: bool) -> list[BackendRef]:
    refs = [_ref(item) for item in wanted] if wanted else default_candidates(device, install=install)
    if not refs:
        hint = "run `parity-audit doctor`, or name one with --candidate"
        raise UsageError("no candidate can run here", code="no-candidate", hint=hint)
    for ref in refs:
        recipe_for(ref, device)  # raises for a malformed version before anything is run
    return refs


def specs() -> tuple[Spec, ...]:
    """Return every shipped spec."""
    return list_specs()


def envs() -> list[tuple[str, str, int]]:
    """Return (key, backend, bytes) of every environment on disk."""
    return list_envs()


def tested_releases() -> list[tuple[str, list[str]]]:
    """Return (backend, releases that have a tested recipe) for each backend."""
    return [(name, entry["known"]) for name, entry in table()["backends"].items()]


def create_env(backend: BackendLike, *, device: str = "cpu", progress: Progress = SILENT) -> str:
    """Create the environment of a backend and return the path of its interpreter. Raises EnvFailed."""
    return python_for(_ref(backend), device=device, progress=progress).python


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of `doctor`: whether the thing called `name` works here."""

    name: str
    ok: bool
    why: str


def doctor() -> list[Check]:
    """Return what can run on this machine, and for the rest the reason why it cannot."""
    return [Check(name=name, ok=ok, why=why) for name, ok, why in health()]
