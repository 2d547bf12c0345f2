"""What the shell offers after TAB: names of models, backends, releases, probes and environments. No engine is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from parity_audit.core.backend_ref import BACKENDS, PORT

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
SIZES = ("mini", "small", "full", "resaved", "real")
Offer = Callable[..., list[str]]


def _offer(names: Callable[[], Iterable[str]]) -> Offer:
    """A completion callback: those of the names that go on from what was typed."""

    def complete(incomplete: str) -> list[str]:
        return sorted({name for name in names() if name.startswith(incomplete)})

    return complete


def _models() -> list[str]:
    from parity_audit.specs.load import list_specs

    entries = [item for spec in list_specs() for item in spec.content.models.items()]
    return [name for repo_id, entry in entries for name in (repo_id, *entry.aliases)]


def _backends() -> list[str]:
    from parity_audit.envs.recipes import table

    releases = (f"{name}=={known}" for name, entry in table()["backends"].items() for known in entry["known"])
    return [*BACKENDS, f"{PORT}:", *releases]


def _probes() -> list[str]:
    from parity_audit.capture.probes import plan_probes
    from parity_audit.specs.load import list_specs

    configs = (next(iter(spec.content.models.values())).config for spec in list_specs())
    return [probe.name for config in configs for probe in plan_probes(config)]


def _environments() -> list[str]:
    from parity_audit.envs.build import envs_root, is_ready

    return [folder.name for folder in envs_root().glob("*/") if is_ready(folder)]


def _specs() -> list[str]:
    from parity_audit.specs.load import list_specs

    return [spec.name for spec in list_specs()]


def fixed(*names: str) -> dict[str, Any]:
    """Arguments of an option with few values."""
    return {"autocompletion": _offer(lambda: names)}


models, backends, probes = _offer(_models), _offer(_backends), _offer(_probes)
environments, specs = _offer(_environments), _offer(_specs)
