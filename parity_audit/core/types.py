"""The nouns that flow through an audit, before anything is judged. The judged ones are in `report.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Union

from parity_audit.core.shards import RankTensor, RankValue

Scalar = Union[float, int, str, bool, None]
KnobValue = Union[Scalar, list[Any], dict[str, Any]]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

TAKEN_FOR_GRANTED = {
    "attention:query": "the operands of the first product of two 4-D tensors in the attention are rotated queries and keys",
    "attention:key": "the operands of the first product of two 4-D tensors in the attention are rotated queries and keys",
    "attention:scores": "what enters a softmax in the attention are the scaled and masked scores",
    "attention:pattern": "what leaves a softmax in the attention is the pattern",
    "attention:output": "the product of two 4-D tensors behind the softmax in the attention is the output of its heads",
}
"""What a tap without a module of its own assumes of the way a port computes, by its `take`."""


@dataclass(frozen=True, kw_only=True)
class NotTested:
    """Something this run did not look at, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NotVisible:
    """A site that a backend cannot show, and why."""

    site: str
    why: str


@dataclass(frozen=True, kw_only=True)
class BackendRef:
    """A BACKEND string, parsed: `name[==version][,key=value...]`, or `python:FILE:FUNCTION[,key=value...]`.

    `target` is FILE:FUNCTION with an absolute path, None for backends that are installed.
    """

    name: str
    version: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    target: str | None = None

    def __str__(self) -> str:
        version = f"=={self.version}" if self.version else f":{self.target}" if self.target else ""
        settings = "".join(f",{key}={_written(value)}" for key, value in self.settings.items())
        return f"{self.name}{version}{settings}"


def _written(value: Any) -> str:
    """A setting as a BACKEND string holds it: JSON, but text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights on disk: `path` holds config.json and safetensors.

    `by_name`: the worker's hub cache holds these weights as `repo_id`, so that they are loaded by that name; a directory
    that the user gave is loaded by its path.
    `hf_home` is set when the weights live in a hub cache of our own (miniatures, and one commit of a model of the hub):
    workers then get `HF_HOME` and `HF_HUB_OFFLINE=1`, so every backend loads `repo_id` through its ordinary code path.
    `revision` is the commit of a model of the hub.
    `synthetic` is None for real weights, else "mini", "small" or "full"; only then may a backend
    replace the sizes (never the constants) that a port hard-codes by model name.
    """

    repo_id: str
    path: str
    by_name: bool = False
    hf_home: str | None = None
    synthetic: str | None = None
    fingerprint: str = ""
    revision: str = ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the directory holds a tokenizer's file, whatever is in it."""
        return any(Path(self.path, name).is_file() for name in TOKENIZER_FILES)

    @property
    def in_reports(self) -> dict[str, object]:
        """Where the weights came from, their fingerprint, and of a model of the hub its name and commit."""
        source = f"synthetic:{self.synthetic}" if self.synthetic else self.path
        hub = {"repo_id": self.repo_id, "revision": self.revision} if self.revision else {}
        return {"source": source, "fingerprint": self.fingerprint, **hub}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Token ids built to expose something.

    `token_ids` and `mask` are `[batch, pos]`; mask 0 marks padding, which no backend may attend to and
    no comparison may look at. `sites` names what to capture: "all", or "residual" (embed, resid_*, norms
    out of blocks, logits) for probes whose attention matrices would not fit. `decode_from` is the position from which
    candidates are given one token at a time, with their cache; the reference and the judge run every probe whole. `at_once`:
    how many tokens the first step behind the prompt has, as where a prompt is continued or drafted tokens are verified;
    engines, which schedule by themselves, decode these one at a time as well.
    `kept` are the positions that are written, all where it is empty; a capture's own probe has the tokens of these alone.
    """

    name: str
    purpose: str
    token_ids: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]
    sites: str = "all"
    decode_from: int | None = None
    at_once: int = 1
    kept: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.token_ids), len(self.token_ids[0])

    @property
    def length(self) -> int:
        """How many positions were run, whether they are kept or not."""
        return max(self.shape[1], self.kept[-1] + 1 if self.kept else 0)

    def as_captured(self) -> Probe:
        """The tokens of the positions that are kept."""
        if not self.kept or len(self.kept) == self.shape[1]:
            return self
        ids, mask = (tuple(tuple(row[at] for at in self.kept) for row in rows) for rows in (self.token_ids, self.mask))
        return replace(self, token_ids=ids, mask=mask)

    def columns(self, start: int, stop: int | None) -> Probe:
        """The same rows from position `start` up to `stop`."""
        ids, mask = (tuple(row[start:stop] for row in rows) for rows in (self.token_ids, self.mask))
        if len(self.kept) == self.shape[1]:
            return replace(self, token_ids=ids, mask=mask, kept=self.kept[start:stop])
        end = self.shape[1] if stop is None else stop
        return replace(self, token_ids=ids, mask=mask, kept=tuple(at - start for at in self.kept if start <= at < end))


@dataclass(frozen=True, kw_only=True)
class SiteTap:
    """Where one backend shows one site.

    `module` is a dotted path from the root module; `take` says what of it is the site:

    - `output` / `input`: the first tensor the module returns / is given
    - `output:N` / `input:N`: the N-th element of the returned tuple / N-th positional input
    - `input:NAME`: the argument of that name, of a module that is given it by name
    - `method:NAME` / `method:NAME:N`: what a method other than forward returns / its N-th positional argument
    - `output_sum`: the sum of the first two returned tensors (vLLM's `(hidden, residual)`)
    - `output_scatter:N`: element N, weights of the experts that element N+1 names, as a dense tensor over all experts
    - `input_sum:N`: the sum of positional inputs N and N+1, where the second may be None or missing
    - `compute_logits`: the engine's own logits of the module's first output, at every position (vLLM)
    - `attention:query|key|scores|pattern|output`: locals of the attention's code, taken from the calls that consume them
      (query and key after rotation). No module shows them, so such a tap rests on an assumption, see `assumes`
    - `hook`: what TransformerLens' own hook of the name `module` is given, set by name as its users do

    `slice` keeps `[start, stop)` of the last axis, `layout` is an einops pattern from the backend's own axes
    to the canonical ones of DESIGN (`b p d_model`, `b p head d_head`, `b head query_pos key_pos`), with `sizes`
    for the axes that einops cannot infer; `b` and `p` of a flattened `(b p ...)` are the probe's. Fused and
    interleaved tensors go on: `part` keeps `[start, stop)` of the last axis that `layout` made, and `relayout`
    leads from there to the canonical axes.
    """

    site: str
    module: str
    take: str = "output"
    slice: tuple[int, int] | None = None
    layout: str = ""
    part: tuple[int, int] | None = None
    relayout: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    scale: float | None = None

    @property
    def assumes(self) -> str:
        """What has to hold of a port's code for this tap to show its site; empty where a module shows it."""
        return TAKEN_FOR_GRANTED.get(self.take, "")


@dataclass(frozen=True, kw_only=True)
class WeightTap:
    """Where one backend keeps one checkpoint tensor, and how to bring it back to the checkpoint's layout.

    Canonical value = rearrange(rearrange(param[slice], layout)[part], relayout) * scale + shift; `slice` and
    `part` cut the first axis.
    """

    name: str
    path: str
    slice: tuple[int, int] | None = None
    layout: str = ""
    part: tuple[int, int] | None = None
    relayout: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    scale: float | None = None
    shift: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderFacts:
    """All that the formulas need to know of a model besides its tensors.

    `values` has one value per layer for each knob of the spec. `outside` and `blocks` say which checkpoint tensor, or which
    part of one, plays a role outside the blocks and in each block. `tied`: an unembedding that is not stored is the embedding.
    """

    dims: dict[str, int]
    values: dict[str, list[Any]]
    outside: dict[str, WeightTap]
    blocks: tuple[dict[str, WeightTap], ...]
    tied: bool


@dataclass(frozen=True, kw_only=True)
class WeightPrint:
    """Fingerprint of one tensor in the checkpoint's layout, taken in float64.

    `sketch` are inner products with fixed waves, relative to the norm: equal tensors have equal
    sketches up to rounding, a transposed, shifted or permuted one does not. `ranks` says it where a rank of a sharded engine
    does not hold its own part.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    rms: float
    sketch: tuple[float, ...]
    ranks: RankTensor | None = None


MAY_BE_MISSING = "?"
"""Ends the name of a step of a path that an object may be without; the path then ends there."""


EVERY = "[*]"
"""In the path of an edit or a reading: every element of a list of modules. A list as value has one entry for each."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One reversible change of a live model.

    - op `set`: write `value` at `path` (attributes, `[3]`, `[*]` for every element)
    - op `add`: add the number `value` to the tensor at `path`
    - op `scale_output`: multiply what the module at `path` returns by `value`
    - op `load`: settings to load the backend with (`value` is a dict); needs a fresh load
    - op `rotary_tables`: rewrite the sin/cos tables of the modules at `path` from
      `value = {"inv_freq": [...], "attention_factor": float, "pairing": "half" | "adjacent"}`, or one per module
    - op `causal_windows`: rewrite the causal masks at `path`; `value` is a window or None per mask
    - op `activation`: put the activation that transformers calls `value` at `path`

    A path that begins with `rank 1: ` is in the model of that rank of a sharded engine alone. Such engines also know the
    operations of `backends/vllm_plants.py`, which plant faults of sharding.
    """

    op: str
    path: str = ""
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """What the live module held before an edit and holds after it, per matched path; long tensors only by their shape."""

    path: str
    before: Any
    after: Any
    changed: bool = True


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a loaded backend says about itself: versions and settings read from live modules, not from configs.

    `section` names the spec's section that describes a port, whose kind is only known once it is loaded.
    `processing` lists what was done to the weights (TransformerLens: `fold_ln`, `center_unembed`, ...); `not_run` the
    ways to run this backend that its settings leave out; `ranks_differ` the live values in which ranks of it differ.
    `tokenizer_error` is why the checkpoint's tokenizer could not be loaded. `text_paths` says of a text model among other
    modalities how paths in it begin, and how they do in the model that was loaded.
    """

    backend: str
    package: str
    version: str
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Any] = field(default_factory=dict)
    tokenization: dict[str, list[int]] = field(default_factory=dict)
    tokenizer_error: str = ""
    max_positions: int | None = None
    sizes_replaced: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)
    not_visible: tuple[NotVisible, ...] = ()
    parameters: int = 0
    section: str = ""
    processing: tuple[str, ...] = ()
    not_run: tuple[NotTested, ...] = ()
    ranks_differ: tuple[RankValue, ...] = ()
    text_paths: dict[str, str] = field(default_factory=dict)

    @property
    def release(self) -> str:
        """The engine's version and that of the transformers beneath it, as a spec's variants ask for them: `3.0.0 on 5.5.4`."""
        beneath = self.versions.get("transformers")
        return f"{self.version} on {beneath}" if beneath else self.version
