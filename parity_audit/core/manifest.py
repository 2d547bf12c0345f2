"""The manifest of a capture: the contents of a capture directory, which any program can read and write.

A capture directory is `manifest.json` plus one safetensors file per probe and site, each with one tensor named `x`.
llama.cpp, MLX or JAX can write it; `parity-audit diff` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.shards import RankShare
from parity_audit.core.types import Checkpoint, Description, NotTested, NotVisible, Probe, WeightPrint

MANIFEST_NAME = "manifest.json"
CAPTURE_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a capture.

    `file` is relative to the manifest. `non_finite` counts NaN and infinity; in `attn_scores`, masked entries are -inf
    by definition and are not counted. `assumes` says what must hold of the program's code for the tensor to be this
    site; it is empty if a module or hook of the program is the site.
    """

    probe: str
    site: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    non_finite: int = 0
    assumes: str = ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Provenance and contents of one capture.

    `precision` is "native", or "float64" for a run with every cast promoted; only such a run can judge others.
    `architecture` and `spec` name the spec by which the sites were read; both may be empty. `checkpoint.fingerprint` is
    equal only for captures of the same weights. `probes` are the probes as they were run: fewer positions if a port
    takes fewer. `shares` is what each rank of a sharded engine held. `raised` has, for each probe that failed, the
    program's own error.
    """

    format: int = CAPTURE_FORMAT
    backend: str
    dtype: str
    device: str
    checkpoint: Checkpoint
    precision: str = "native"
    architecture: str = ""
    spec: str = ""
    description: Description | None = None
    probes: tuple[Probe, ...] = ()
    entries: tuple[Entry, ...] = ()
    not_visible: tuple[NotVisible, ...] = ()
    not_tested: tuple[NotTested, ...] = ()
    raised: dict[str, str] = field(default_factory=dict)
    weights: tuple[WeightPrint, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    shares: tuple[RankShare, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
