"""Run a lint: from model names to the constants in which an engine's config departs from the spec."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parity_audit.cache.root import cache_root
from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK, UsageError
from parity_audit.core.lint_report import Departure, LintReport
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef
from parity_audit.core.wire import ConfigsReply, ConfigsRequest
from parity_audit.envs.build import python_for
from parity_audit.lint.compare import same
from parity_audit.lint.transformer_lens import knobs_of
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.schema import ResolvedKnob, Spec
from parity_audit.specs.view import collapse_equal, dims, knob_values
from parity_audit.workers.client import Worker

TRANSFORMER_LENS = ("hooked_transformer", "transformer_bridge")
NOTES = {
    "transformer_bridge": "TransformerBridge computes with the modules of transformers: what departs here is what `model.cfg` says "
    "to its reader, and what code that takes constants from it will use",
    "hf": "what this release makes of the released config.json",
    "vllm": "what vLLM makes of the released config.json; its modules read their constants from that",
    "hooked_transformer": "HookedTransformer builds its modules from this config",
}
NO_SPEC = "no spec lists this name with its config"


def run_lint(
    model: str | None, backend: BackendRef, *, install: bool = True, progress: Progress = SILENT
) -> LintReport:
    """Compare an engine's own config of released models with their specs.

    Args:
        model: one name; if None, every name that has a spec and a config.
        backend: the engine.
        install: whether its environment may be installed.
        progress: receives the steps.

    Raises:
        UsageError: the backend has no config of its own.
        EnvFailed: its environment cannot be made.
    """
    started = time.perf_counter()
    environment = python_for(backend, allow_install=install, progress=progress)
    if environment.backend_key not in NOTES:
        raise UsageError(
            f"`{backend}` has no config of its own", code="lint-backend", expected="transformer_lens, vllm or hf"
        )
    wanted = dict(_released(model))
    progress.update("configs", str(backend))
    reply = _asked(environment.backend_key, environment.python, environment.env_vars, wanted)
    is_cfg = environment.backend_key in TRANSFORMER_LENS
    found, constants = [], 0
    compared = tuple(name for name in wanted if name in reply.configs)
    for name in compared:
        spec, config = wanted[name]
        rows = list((_of_fields if is_cfg else _of_config)(spec, config, reply.configs[name]))
        constants += len(rows)
        found += [_departure(name, spec, row) for row in rows if not row[4]]
    return LintReport(
        backend=backend.name, version=reply.version, compared=compared, constants=constants, departures=tuple(found),
        without=_without(reply, wanted, everything=model is None), note=NOTES[environment.backend_key],
        seconds=time.perf_counter() - started,
        exit_code=EXIT_NOT_JUDGED if not constants else EXIT_MISMATCH if found else EXIT_OK,
    )  # fmt: skip


def _released(model: str | None) -> Iterator[tuple[str, tuple[Spec, Mapping[str, Any]]]]:
    """Yield names with their spec and released config; a name in two specs belongs to the first."""
    if model is not None:
        resolved = resolve_model(model)
        yield resolved.repo_id, (resolved.spec, resolved.config)
        return
    seen = set()
    for spec in list_specs():
        for name, entry in spec.content.models.items():
            if name not in seen:
                seen.add(name)
                yield name, (spec, entry.config)


def _asked(key: str, python: str, env_vars: dict[str, str], wanted: Mapping[str, Any]) -> ConfigsReply:
    """The engine's own configs, from a worker that loads no model."""
    (cache_root() / "workers").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker.start(key, python, env_vars, Path(folder) / "lint.log", Path(folder), cwd=Path(folder))
        try:
            return worker.configs(ConfigsRequest(configs={name: dict(config) for name, (_, config) in wanted.items()}))
        finally:
            worker.kill()


Row = tuple[str, str, Any, Any, bool]
"""Knob, field of the config, the engine's value, the spec's value, and whether the two are equal."""


def _of_fields(spec: Spec, config: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the constants and sizes in a TransformerLens config."""
    sizes, known = _sizes(spec, config), knob_values(spec, config)
    for size in ("d_model", "n_heads", "d_head", "d_mlp", "n_layers", "d_vocab"):
        if size in sizes and fields.get(size) is not None:
            yield size, size, fields[size], sizes[size], fields[size] == sizes[size]
    for knob, (field, value) in knobs_of(fields, sizes["n_layers"]).items():
        if knob in known:
            yield _row(knob, field, value, known[knob], sizes)


def _sizes(spec: Spec, config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a config, with `d_rot`, the number of dimensions of a head that are rotated."""
    sizes, partial = dims(spec, config), knob_values(spec, config).get("rope.partial")
    return {**sizes, "d_rot": int(partial.value) if partial and partial.value else sizes["d_head"]}


def _of_config(spec: Spec, config: Mapping[str, Any], parsed: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the spec's constants, evaluated on the config.json as the engine reads it and on the released one."""
    sizes, known = _sizes(spec, config), knob_values(spec, config)
    theirs = knob_values(spec, parsed)
    for knob, item in known.items():
        other = theirs.get(knob, ResolvedKnob(value=None))
        yield _row(knob, "config.json", [other.at(layer) for layer in range(sizes["n_layers"])], item, sizes)


def _row(knob: str, field: str, value: Any, known: ResolvedKnob, sizes: Mapping[str, int]) -> Row:
    """The comparison of one knob in every layer."""
    layers = range(sizes["n_layers"])
    own = value if isinstance(value, list) and len(value) == len(layers) else [value] * len(layers)
    said = [known.at(layer) for layer in layers]
    agree = all(same(knob, one, other, sizes["d_head"], sizes["d_rot"]) for one, other in zip(own, said, strict=True))
    return knob, field, collapse_equal(own), collapse_equal(said), agree


def _departure(name: str, spec: Spec, row: Row) -> Departure:
    knob, field, engine, said, _ = row
    return Departure(model=name, architecture=spec.architecture, knob=knob, field=field, engine=engine, spec=said)


def _without(reply: ConfigsReply, wanted: Mapping[str, Any], *, everything: bool) -> dict[str, str]:
    """Names in the engine's table and in the specs that were not compared, and why."""
    mine = {
        name: reply.without.get(name, "the engine does not list it") for name in wanted if name not in reply.configs
    }
    others = {name: NO_SPEC for name in reply.configs if name not in wanted}
    return {**reply.without, **others, **mine} if everything else mine
