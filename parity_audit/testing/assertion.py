"""One assertion: a candidate computes what a reference computes, on the miniature of a spec."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity_audit.core.errors import EXIT_OK, UsageError
from parity_audit.core.report import Report

Port = str | Callable[..., Any]


def assert_parity(
    reference: Port = "hf",
    candidate: Port = "transformer_lens",
    *,
    spec: str | Path | None = None,
    model: str | None = None,
    probes: Sequence[str] | None = None,
    miniature: str = "mini",
    seed: int = 0,
    dtype: str = "float32",
    out: str | Path | None = None,
    **options: Any,
) -> Report:
    """Fail where the candidate does not compute the reference's function up to rounding, or where that could not be judged.

    Args:
        reference: a BACKEND that is believed, or the loader of a port: `def load(model_path, dtype, device)`.
        candidate: the same, judged.
        spec: a spec file of one's own, or the name of a shipped one; its first model is run.
        model: a known model, instead of or beside `spec`.
        probes: names of the probes to run; all when None.
        out: where the report is written; a temporary folder when None.
        options: of `parity_audit.audit`.

    Raises:
        AssertionError: with layer, component, constant and patch.
        UsageError: neither spec nor model, or one that does not exist.
    """
    from parity_audit.api import audit
    from parity_audit.report.assertion import failure
    from parity_audit.specs.load import OWN_SPECS

    before = os.environ.get(OWN_SPECS)
    name = _model(spec, model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = audit(
                name, candidates=[_backend(candidate)], reference=_backend(reference), miniature=miniature, seed=seed,
                dtype=dtype, probes=probes, out=Path(out or folder), **options,
            )  # fmt: skip
    finally:
        os.environ.pop(OWN_SPECS, None)
        os.environ.update({} if before is None else {OWN_SPECS: before})
    if report.exit_code != EXIT_OK:
        raise AssertionError(failure(report))
    return report


def _model(spec: str | Path | None, model: str | None) -> str:
    """The model to run; a spec file is found before shipped ones from here on."""
    from parity_audit.specs.load import OWN_SPECS, load_spec

    if spec is None and model is None:
        raise UsageError("assert_parity needs a spec or a model", hint='spec="my_spec.yaml", or model="gemma-2-2b-it"')
    if spec is None:
        return str(model)
    loaded = load_spec(spec)
    if str(spec).endswith(".yaml"):
        os.environ[OWN_SPECS] = str(Path(spec).resolve())
    return model or loaded.first_model


def _backend(port: Port) -> str:
    """A BACKEND string; a function is the loader of a port in its file."""
    if isinstance(port, str):
        return port
    file = inspect.getsourcefile(port)
    if file is None or "<locals>" in port.__qualname__:
        raise UsageError(f"{port!r} is no function of a file: a worker has to import it", hint="python:FILE:FUNCTION")
    return f"python:{file}:{port.__name__}"
