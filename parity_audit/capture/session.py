"""One backend of an audit: its plan, and a worker process that is started on demand and ended when memory is needed.

A session may be prepared ahead, loads the model on first use, keeps it for replays and patched runs, and after `release()`
loads it again on the next use. Edits are part of the session's state: they are made again after a reload.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from parity_audit.cache.locks import Lock
from parity_audit.cache.root import cache_root
from parity_audit.capture.hub_home import shared_home
from parity_audit.capture.prompts import Prompt
from parity_audit.capture.scratch import Scratch
from parity_audit.core.backend_ref import LIVE
from parity_audit.core.errors import NotJudged, WorkerDied
from parity_audit.core.operations import OperationsReply, OperationsRequest
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.rollouts import SampleReply, SampleRequest, ScoreReply, ScoreRequest
from parity_audit.core.types import BackendRef, Checkpoint, Description, Edit, ReadBack, WeightPrint
from parity_audit.core.wire import ApplyRequest, LoadRequest, RunReply, RunRequest, WeightsRequest
from parity_audit.envs.build import Environment
from parity_audit.envs.heal import rebuild_if_damaged, use
from parity_audit.specs.as_program import SPEC
from parity_audit.specs.checkpoints import stored_names
from parity_audit.specs.facts import decoder_facts
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import dims, reads, unread_tensors, weight_taps
from parity_audit.workers.asking import BackendClient
from parity_audit.workers.client import TIMEOUT, Worker
from parity_audit.workers.forks import imported_before
from parity_audit.workers.live import LiveWorker

T = TypeVar("T")
HUB_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE")
"""Variables that take precedence over HF_HOME in some release: one that the user has set must be redirected for a miniature."""
LONGEST = {"vllm": "max_model_len", "sglang": "context_length", "sglang_server": "context_length"}
"""The setting by which an engine is told for how many positions it must reserve memory."""
TOKENIZE = ("The quick brown fox jumps over 13 lazy dogs.",)


@dataclass(frozen=True, kw_only=True)
class SidePlan:
    """One side of an audit: which program runs, in which environment, on which weights.

    `left_out` and `centred` name sites without their blocks: `left_out` are the sites that no run captures, each with the
    reason; from the captured values of the `centred` sites the mean over the last axis is subtracted.
    """

    ref: BackendRef
    environment: Environment
    checkpoint: Checkpoint
    spec: Spec
    config: dict[str, Any]
    dtype: str
    device: str
    max_positions: int
    section: str = ""
    install: bool = True
    prompts: tuple[Prompt, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    centred: frozenset[str] = frozenset()

    @property
    def backend_key(self) -> str:
        """The spec's section for this backend (hf, hooked_transformer, transformer_bridge, vllm), or the one a port reported."""
        return self.section or self.environment.backend_key


def _texts(plan: SidePlan) -> tuple[str, ...]:
    """Return the texts that every side tokenises itself: the user's own texts, or else a built-in sentence."""
    return tuple(prompt.text for prompt in plan.prompts if prompt.text is not None) or TOKENIZE


@dataclass
class Session:
    """A backend that answers requests; see the module docstring for when it is loaded.

    `decodes`: whether probes with decode steps run through its KV cache (a candidate) or as one prefill (a reference).
    `timeout`: seconds that one request may take. `home`: the directory in which its process runs; None for the parent's.
    `scratch`: the bound on what its captures may write, if there is one.
    """

    plan: SidePlan
    log: Path
    decodes: bool = False
    timeout: float = TIMEOUT
    home: Path | None = None
    scratch: Scratch | None = None
    progress: Progress = SILENT
    load_settings: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    read_back: tuple[ReadBack, ...] = ()
    _worker: BackendClient | None = None
    _ready: BackendClient | None = None
    _description: Description | None = None
    _unedited: Description | None = None
    _use: Lock | None = None

    @property
    def label(self) -> str:
        """The BACKEND string, as the user knows it."""
        return str(self.plan.ref)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory now."""
        return self._worker is not None

    def prepare(self) -> None:
        """Start the process and let it import its engine while other backends work; no model is loaded yet."""
        if self._worker is None and self._ready is None:
            self._ready = self._started()
            self._ready.prepare(self._request())

    def description(self) -> Description:
        """Return the backend's description of itself; the model is loaded first if it never was."""
        if self._description is None:
            self._loaded()
        assert self._description is not None
        return self._description

    def run(self, request: RunRequest) -> RunReply:
        """Run one probe."""
        return self._asked(lambda worker: worker.run(request, on_progress=self._relay(f"run {request.probe.name}")))

    def replay(self, request: RunRequest) -> RunReply:
        """Run one probe with sites replaced by `request.inputs`."""
        relay = self._relay(f"replay {request.probe.name}")
        return self._asked(lambda worker: worker.replay(request, on_progress=relay))

    def sample(self, request: SampleRequest) -> SampleReply:
        """Sample completions, if the backend generates text."""
        return self._loaded().sample(request, on_progress=self._relay("sample"))

    def operations(self, request: OperationsRequest) -> OperationsReply:
        """Run each operation of the loaded model on rows of its own input."""
        return self._asked(lambda worker: worker.operations(request, on_progress=self._relay("operations")))

    def score(self, request: ScoreRequest) -> ScoreReply:
        """Return the log-probabilities of the tokens of given completions."""
        return self._loaded().score(request, on_progress=self._relay("score"))

    def weights(self) -> tuple[WeightPrint, ...]:
        """Return the fingerprints of the checkpoint's tensors in the loaded model."""
        version = self.description().release
        plan = self.plan
        stored = stored_names(Path(plan.checkpoint.path))
        taps = weight_taps(plan.spec, plan.backend_key, plan.config, version, stored)
        return tuple(self._asked(lambda worker: worker.weights(WeightsRequest(taps=taps))))

    def apply(self, edits: tuple[Edit, ...]) -> tuple[ReadBack, ...]:
        """Make exactly these edits in the loaded model and undo all others; changed `load` edits start the backend again."""
        settings: dict[str, Any] = {}
        for edit in edits:
            if edit.op == "load":
                settings = merged(settings, edit.value)
        if settings != self.load_settings:
            self.release()
            self.load_settings = settings
        live = tuple(edit for edit in edits if edit.op != "load")
        if live == self.edits:
            self._loaded()
            return self.read_back
        self._loaded()
        self.edits = ()  # a worker that fails to make an edit undoes all edits
        self.read_back = tuple(self._asked(lambda worker: worker.apply(ApplyRequest(edits=live))))
        self.edits = live
        return self.read_back

    def restore(self) -> None:
        """Undo every edit. A model that was loaded with changed settings is unloaded; the next request loads it unchanged."""
        if self.load_settings or not self.is_loaded:
            self.discard()
        else:
            self.apply(())

    def discard(self) -> None:
        """End the process and drop every edit: the next request loads the unchanged model."""
        self.release()
        self.load_settings, self.edits, self.read_back = {}, (), ()
        self._description = self._unedited

    def release(self) -> None:
        """End the process and free its memory; the next request loads the model again, with the edits."""
        for worker in (self._worker, self._ready):
            if worker is not None:
                worker.kill()
        if self._use is not None:
            self._use.release()
        self._worker = self._ready = self._use = None

    def _asked(self, question: Callable[[BackendClient], T]) -> T:
        """Return the loaded model's answer. If its process died, it is dropped, so that the next request starts a new one."""
        worker = self._loaded()
        try:
            return question(worker)
        except WorkerDied:
            self.release()
            raise

    def _loaded(self) -> BackendClient:
        """Return the loaded model. If loading fails because the environment is damaged, the environment is rebuilt once."""
        if self._worker is not None:
            return self._worker
        try:
            return self._load()
        except NotJudged as failure:
            plan = self.plan
            self.release()
            if not rebuild_if_damaged(
                failure, plan.ref, plan.environment, device=plan.device, install=plan.install, progress=self.progress
            ):
                raise
            return self._load()

    def _load(self) -> BackendClient:
        plan, started = self.plan, time.perf_counter()
        self.progress.update("load", self.label)
        worker, self._ready = self._ready or self._started(), None
        try:
            worker.load(self._request(), on_progress=self._relay("load"))
            description = worker.describe()
            if self.edits:
                self.read_back = tuple(worker.apply(ApplyRequest(edits=self.edits)))
        except BaseException:
            worker.kill()
            raise
        self._worker, self._description = worker, description
        self._unedited = self._unedited if self.load_settings else description
        self.plan = dataclasses.replace(plan, section=description.section)
        self.seconds["load"] = self.seconds.get("load", 0.0) + time.perf_counter() - started
        return worker

    def _started(self) -> BackendClient:
        if self.plan.ref.name == LIVE:
            return LiveWorker(self.label, self.log)
        environment = self.plan.environment
        self._use = self._use or use(environment)
        imported = self._imported_before() if self.plan.device == "cpu" else ()
        return Worker.start(
            environment.backend_key, environment.python, self._environ(shared=bool(imported)), self.log,
            cache_root() / "workers", self.timeout, cwd=self.home, imported=imported,
        )  # fmt: skip

    def _imported_before(self) -> tuple[str, ...]:
        ref = self.plan.ref
        return imported_before(self.plan.environment.backend_key, ref.target, {*ref.settings, *self.load_settings})

    def _request(self) -> LoadRequest:
        plan = self.plan
        longest = LONGEST.get(plan.backend_key)
        settings = merged({longest: plan.max_positions} if longest else {}, plan.ref.settings)
        return LoadRequest(
            checkpoint=plan.checkpoint, dtype=plan.dtype, device=plan.device,
            settings=merged(settings, self.load_settings), architecture=plan.spec.architecture,
            sizes=dims(plan.spec, plan.config),
            reads=reads(plan.spec, plan.backend_key, plan.environment.version), tokenize=_texts(plan),
            chats=tuple(prompt.chat for prompt in plan.prompts if prompt.chat is not None),
            decoder=decoder_facts(plan.spec, plan.config) if plan.backend_key == SPEC else None,
            target=plan.ref.target, reads_by_section=self._reads_by_section() if plan.ref.target else {},
            unread=unread_tensors(plan.spec, plan.config),
        )  # fmt: skip

    def _reads_by_section(self) -> dict[str, dict[str, str]]:
        plan = self.plan
        return {name: reads(plan.spec, name, "") for name in plan.spec.content.backends}

    def _environ(self, *, shared: bool) -> dict[str, str]:
        environ, hf_home = dict(self.plan.environment.env_vars), self.plan.checkpoint.hf_home
        if hf_home is None:
            return environ
        home = shared_home(Path(hf_home)) if shared else Path(hf_home)
        own = {name: str(home / "hub") for name in HUB_CACHES if name in os.environ}
        return {**environ, **own, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def _relay(self, stage: str) -> Any:
        return lambda text, done=None, total=None: self.progress.update(stage, f"{self.label} {text}", done, total)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `over`; nested dictionaries are merged in the same way."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out
