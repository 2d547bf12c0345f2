"""The messages between parent and worker: one JSON object per line, on a file descriptor of its own.

Engines print on stdout, so the wire never uses it. Tensors never cross the wire: the worker writes safetensors and
replies with the manifest entries.

Parent to worker: `{"id": 7, "op": "run", "args": {...}}`.
Worker to parent: any number of `{"id": 7, "progress": {"text": ..., "done": 3, "total": 6}}`, then one of
`{"id": 7, "result": {...}}` or `{"id": 7, "error": {"code", "message", "hint", "traceback"}}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.manifest import Entry
from parity_audit.core.shards import RankShare
from parity_audit.core.types import Checkpoint, DecoderFacts, Edit, NotTested, NotVisible, Probe, SiteTap, WeightTap

PROTOCOL = 1
WIRE_FD_ENV = "PARITY_AUDIT_WIRE_FD"
FORK_SERVER, FORK_SERVER_FD_ENV = "fork-server", "PARITY_AUDIT_FORK_SERVER_FD"
"""The worker program's argument that makes it a server of forked workers, and the environment variable with the file
descriptor of that server's control socket."""

NATIVE = "native"
FLOAT64 = "float64"

BATCH_INVARIANT = "batch_invariant"
"""The setting with which a backend is asked for batch-invariant kernels."""
DEVICE_MAP, MAX_MEMORY, OFFLOAD_FOLDER = "device_map", "max_memory", "offload_folder"
PLACES = (DEVICE_MAP, MAX_MEMORY, OFFLOAD_FOLDER, "offload_buffers")
"""Settings of transformers that say on which device or disk the parts of a model are placed; they are not keys of
its config."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Load a model. `module` names the backend implementation, for example `parity_audit.backends.hf:load`.

    `reads` maps a knob to the dotted paths of the live values that implement it; `describe` reads them. A port gets
    those of every section in `reads_by_section`, because only the port knows which section describes it. `decoder`: the
    spec's values and roles, for the backend that runs the spec itself. `unread`: names of tensors that the model does
    not use in this checkpoint, such as keys of layers that share those of others. A release that builds them may
    initialise them at random.
    """

    checkpoint: Checkpoint
    dtype: str
    device: str
    settings: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    tokenize: tuple[str, ...] = ()
    chats: tuple[str, ...] = ()
    target: str | None = None
    reads_by_section: dict[str, dict[str, str]] = field(default_factory=dict)
    decoder: DecoderFacts | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Run one probe and write the sites of `taps` below `out`.

    `precision` is "native", or "float64" for the judge (reference backends only). `inputs` maps a site to a safetensors
    file. Such a site is first recorded as computed, then replaced by the file's tensor before the model continues. If
    every visible site of a capture is given, each recorded tensor is what this model computes from that capture's own
    immediate inputs: the error that a component introduces, without the error that it inherits. `imposed` maps a site
    to a file of the site's shape whose entries, where they are not NaN, count as what the model computed. `cached`: from
    `probe.decode_from` on, one token at a time. `returned`: also write what the call itself returned, as the site of
    that name.

    How the probe is run: `rows` are the rows of the batch that are written (None: all). `chunk` is the number of prompt
    tokens that go through the cache at a time. `threads` is the number of threads for this run. `keep_cache` keeps the
    contents of an engine's prefix cache; otherwise it is emptied first.
    """

    probe: Probe
    taps: tuple[SiteTap, ...]
    out: str
    precision: str = NATIVE
    inputs: dict[str, str] = field(default_factory=dict)
    imposed: dict[str, str] = field(default_factory=dict)
    cached: bool = False
    returned: bool = False
    rows: tuple[int, ...] | None = None
    chunk: int | None = None
    threads: int | None = None
    keep_cache: bool = False

    @property
    def in_steps(self) -> bool:
        """Whether the probe goes through the cache in more than one step."""
        return self.cached or self.chunk is not None


@dataclass(frozen=True, kw_only=True)
class RunReply:
    """What a run wrote, and what it could not show. `positions` is how many of the probe's positions it ran, None for
    all.

    `facts` has what the program itself counted: threads, requests and tokens of each step, tokens from a prefix cache.
    `shares` is what each rank of a sharded engine held. `raised` is the program's own error, if the run failed; a
    failure is not the same as a site that the program does not have.
    """

    entries: tuple[Entry, ...]
    not_visible: tuple[NotVisible, ...] = ()
    not_tested: tuple[NotTested, ...] = ()
    raised: str = ""
    seconds: float = 0.0
    positions: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    shares: tuple[RankShare, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightsRequest:
    """Fingerprint these tensors of the live model."""

    taps: tuple[WeightTap, ...]


@dataclass(frozen=True, kw_only=True)
class ApplyRequest:
    """Set the live model to exactly these edits: earlier edits that are not listed are undone."""

    edits: tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigsRequest:
    """Ask for the engine's own version of these configs, by the model name under which each would be loaded; no
    weights are loaded."""

    configs: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ConfigsReply:
    """The engine's own config by name; `without` has the names (of its table or the request) that gave none, each
    with the reason."""

    version: str
    configs: dict[str, dict[str, Any]]
    without: dict[str, str]
