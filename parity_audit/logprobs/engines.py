"""Choose the engine to compare: one that is started here, or a server that is running already."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef
from parity_audit.envs.recipes import SERVED

ROLLOUTS_ONLY = {"sglang": ("return_original_logprob",)}
"""Settings that only the part of an engine that samples understands."""


def served(url: str, engine: BackendRef | None, *, restarts: bool) -> BackendRef:
    """Return the BACKEND of the running server at `url`.

    Args:
        url: its address.
        engine: which engine the server must be; None accepts any.
        restarts: whether the question needs an engine that is started with other settings.

    Raises:
        UsageError: `url` is not an address, `engine` has settings or a version, or the question needs `restarts`, which a
            running server cannot do.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            f"`{url}` is no address of a server", code="engine-url", hint="for example http://127.0.0.1:8000"
        )
    if restarts:
        raise UsageError(
            "--engine-mode, --prefix-cache, --attribute and --explain start engines of their own", code="engine-url",
            hint="drop --engine-url, or that option",
        )  # fmt: skip
    if engine is not None and (engine.settings or engine.version):
        raise UsageError(
            f"`{engine}` has a version or settings, and a server has its own",
            code="engine-url",
            hint=f"--engine {engine.name}",
        )
    whose = {} if engine is None else {"engine": engine.name}
    return BackendRef(name=SERVED, settings={"url": url, **whose})


def bare_engine(engine: BackendRef) -> BackendRef:
    """Return the engine as a backend for a layer audit: without the settings that only its sampler understands."""
    left_out = ROLLOUTS_ONLY.get(engine.name, ())
    return replace(engine, settings={key: value for key, value in engine.settings.items() if key not in left_out})
