"""The types of data in an audit before anything is judged. The types of judged results are in `report.py`."""

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
"""What a tap without a module of its own assumes about the way a port computes, by its `take`."""


@dataclass(frozen=True, kw_only=True)
class NotTested:
    """Something that this run did not check, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NotVisible:
    """A site that a backend cannot show, and why."""

    site: str
    why: str


@dataclass(frozen=True, kw_only=True)
class BackendRef:
    """A parsed BACKEND string: `name[==version][,key=value...]`, or `python:FILE:FUNCTION[,key=value...]`.

    `target` is FILE:FUNCTION with an absolute path, None for installed backends.
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
    """Return a setting as text in a BACKEND string: JSON, but text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Weights on disk: `path` holds config.json and safetensors.

    `by_name`: the worker's hub cache holds these weights as `repo_id`, and they are loaded by that name; a directory
    that the user gave is loaded by its path. `hf_home` is set if the weights are in a hub cache of our own (miniatures,
    and single commits of hub models). Workers then get `HF_HOME` and `HF_HUB_OFFLINE=1`, so that every backend loads
    `repo_id` through its ordinary code path. `revision` is the commit of a hub model. `synthetic` is None for real
    weights, else "mini", "small" or "full"; only for synthetic weights may a backend replace the sizes (never the
    constants) that a port hard-codes by model name.
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
        """Whether the directory holds a tokenizer file, whatever its contents."""
        return any(Path(self.path, name).is_file() for name in TOKENIZER_FILES)

    @property
    def in_reports(self) -> dict[str, object]:
        """The source of the weights, their fingerprint, and for a hub model its name and commit."""
        source = f"synthetic:{self.synthetic}" if self.synthetic else self.path
        hub = {"repo_id": self.repo_id, "revision": self.revision} if self.revision else {}
        return {"source": source, "fingerprint": self.fingerprint, **hub}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Token ids that are built to expose a kind of error.

    `token_ids` and `mask` are `[batch, pos]`. Mask 0 marks padding, which no backend may attend to and no comparison
    may read. `sites` names what to capture: "all", or "residual" (embed, resid_*, norms outside blocks, logits) for
    probes whose attention matrices would not fit. `decode_from` is the position from which candidates get one token at
    a time, with their cache; the reference and the judge run every probe as a whole. `at_once` is the number of tokens
    in the first step after the prompt, as when a prompt is continued or drafted tokens are verified; engines, which
    schedule by themselves, decode these one at a time too. `kept` are the positions that are written, all if it is
    empty; a capture's own probe has the tokens of these positions alone.
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
        """The number of positions that were run, whether they are kept or not."""
        return max(self.shape[1], self.kept[-1] + 1 if self.kept else 0)

    def as_captured(self) -> Probe:
        """Return the probe with only the tokens at the positions that are kept."""
        if not self.kept or len(self.kept) == self.shape[1]:
            return self
        ids, mask = (tuple(tuple(row[at] for at in self.kept) for row in rows) for rows in (self.token_ids, self.mask))
        return replace(self, token_ids=ids, mask=mask)

    def columns(self, start: int, stop: int | None) -> Probe:
        """Return the same rows, cut to the positions from `start` to `stop` (exclusive)."""
        ids, mask = (tuple(row[start:stop] for row in rows) for rows in (self.token_ids, self.mask))
        if len(self.kept) == self.shape[1]:
            return replace(self, token_ids=ids, mask=mask, kept=self.kept[start:stop])
        end = self.shape[1] if stop is None else stop
        return replace(self, token_ids=ids, mask=mask, kept=tuple(at - start for at in self.kept if start <= at < end))


@dataclass(frozen=True, kw_only=True)
class SiteTap:
    """Where one backend shows one site.
    `module` is a dotted path from the root module; `take` says which tensor of the module is the site:

    - `output` / `input`: the first tensor that the module returns / gets
    - `output:N` / `input:N`: the N-th element of the returned tuple / N-th positional input
    - `input:NAME`: the keyword argument of that name
    - `method:NAME` / `method:NAME:N`: the result of a method other than forward / its N-th positional argument
    - `output_sum`: the sum of the first two returned tensors (vLLM's `(hidden, residual)`)
    - `output_scatter:N`: element N, the weights of the experts in element N+1, as a dense tensor over all experts
    - `input_sum:N`: the sum of positional inputs N and N+1, where the second may be None or missing
    - `compute_logits`: the engine's own logits of the module's first output, at every position (vLLM)
    - `attention:query|key|scores|pattern|output`: locals of the attention's code, taken from the calls that consume them
      (query and key after rotation). No module shows them, so such a tap relies on an assumption, see `assumes`
    - `hook`: the tensor that TransformerLens' own hook of the name `module` gets, set by name as its users do

    `slice` keeps `[start, stop)` of the last axis, `layout` is an einops pattern from the backend's own axes
    to the canonical ones of DESIGN (`b p d_model`, `b p head d_head`, `b head query_pos key_pos`), with `sizes`
    for the axes that einops cannot infer; `b` and `p` of a flattened `(b p ...)` are the probe's. Fused and
    interleaved tensors need two more steps: `part` keeps `[start, stop)` of the last axis that `layout` made, and
    `relayout` is the pattern from there to the canonical axes.
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
        """What must hold of a port's code for this tap to show its site; empty if a module shows it."""
        return TAKEN_FOR_GRANTED.get(self.take, "")


@dataclass(frozen=True, kw_only=True)
class WeightTap:
    """Where one backend keeps one checkpoint tensor, and how to convert it back to the checkpoint's layout.

    Canonical value = rearrange(rearrange(param[slice], layout)[part], relayout) * scale + shift; `slice` and `part` cut
    the first axis.
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
    """Everything that the formulas need to know of a model besides its tensors.

    `values` has one value per layer for each knob of the spec. `outside` and `blocks` map each role, outside the blocks
    and in each block, to a checkpoint tensor or a part of one. `tied`: if the unembedding is not stored, it is the
    embedding.
    """

    dims: dict[str, int]
    values: dict[str, list[Any]]
    outside: dict[str, WeightTap]
    blocks: tuple[dict[str, WeightTap], ...]
    tied: bool


@dataclass(frozen=True, kw_only=True)
class WeightPrint:
    """Fingerprint of one tensor in the checkpoint's layout, taken in float64.

    `sketch` holds inner products with fixed waves, relative to the norm: equal tensors have equal sketches up to
    rounding, a transposed, shifted or permuted one does not. `ranks` is set if a rank of a sharded engine does not hold
    its own part.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    rms: float
    sketch: tuple[float, ...]
    ranks: RankTensor | None = None


MAY_BE_MISSING = "?"
"""Marks, at the end of a step's name in a path, an attribute that an object may lack; the path then matches nothing
in that object."""


EVERY = "[*]"
"""In the path of an edit or a reading: every element of a list of modules. If the value is a list, it has one entry
for each."""


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
    """The value in the live module before an edit and after it, per matched path; long tensors only by their shape."""

    path: str
    before: Any
    after: Any
    changed: bool = True


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a loaded backend reports about itself: versions and settings read from live modules, not from configs.

    `section` names the spec's section that describes a port, whose kind is known only after loading. `processing` lists
    what was done to the weights (TransformerLens: `fold_ln`, `center_unembed`, ...). `not_run` are the ways to run this
    backend that its settings exclude. `ranks_differ` are the live values in which its ranks differ. `tokenizer_error`
    is why the checkpoint's tokenizer could not be loaded. `text_paths`, for a text model among other modalities, maps
    the start of a path in the text model to its start in the loaded model.
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
        """The engine's version and that of the transformers it runs on, as a spec's variants ask for them: `3.0.0 on
        5.5.4`."""
        beneath = self.versions.get("transformers")
        return f"{self.version} on {beneath}" if beneath else self.version
