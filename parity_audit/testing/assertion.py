"""An assertion that a candidate computes the same function as a reference, on the miniature of a spec."""

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
    """Audit a candidate and raise unless it is judged to compute the reference's function up to rounding.

    Args:
        reference: a BACKEND string, or the function that loads a port: `def load(model_path, dtype, device)`.
        candidate: the side that is judged, given in the same way as `reference`.
        spec: your own spec file, or the name of a shipped spec; its first model is run unless `model` is given.
        model: the name of a known model, in place of `spec` or in addition to it.
        probes: names of the probes to run; all when None.
        out: the folder for the report; a temporary folder when None.
        options: further arguments of `parity_audit.audit`.

    Raises:
        AssertionError: the candidate is not at parity, or was not judged; the message has layer, component, constant and patch.
        UsageError: neither spec nor model is given, or one of them does not exist.
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
    """Return the model to run. For a spec file, also set the environment variable that puts it before the shipped specs."""
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
    """Return the BACKEND string of a port; a function is named by its file, from which a worker imports it."""
    if isinstance(port, str):
        return port
    file = inspect.getsourcefile(port)
    if file is None or "<locals>" in port.__qualname__:
        raise UsageError(f"{port!r} is no function of a file: a worker has to import it", hint="python:FILE:FUNCTION")
    return f"python:{file}:{port.__name__}"
