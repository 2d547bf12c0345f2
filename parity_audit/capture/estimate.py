"""Estimate what an audit will need, from config and probes, before anything is downloaded, loaded or run.

    capture   sum over probes and sites of  tokens x width of the site x 4 bytes, 8 for the judge
    run       2 x tokens x parameters       multiplications and additions: each weight is applied to each token once; of a
                                            mixture's experts only those that the router chooses

Attention's own products are left out: at the lengths of the probes they are a few percent of a model of real size.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from parity_audit.cache.root import cache_root
from parity_audit.capture.plan import affordable
from parity_audit.capture.probes import plan_probes
from parity_audit.capture.sizes import FLOAT64_BYTES, STORED_BYTES, numbers_of
from parity_audit.capture.take import wanted, whole_in_steps
from parity_audit.core.choices import require_choice
from parity_audit.core.cost import AuditCost, ProbeCost
from parity_audit.core.errors import EXIT_NOT_JUDGED
from parity_audit.core.types import Probe, SiteTap
from parity_audit.specs.canonical import canonical
from parity_audit.specs.config_check import check_config
from parity_audit.specs.resolve import ResolvedModel, resolve_model
from parity_audit.specs.skeleton import skeleton
from parity_audit.specs.view import dims, spec_values, taps

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERTS, TOP_K = ".experts.", "moe.top_k"
TIMED, REPEATS = 1024, 3
"""Rows and columns of the matrix product that is timed, and its repeats: enough to use every core, in under a second."""


def planned_cost(
    model: str, *, weights: Path | None, probes: Sequence[str] | None, dtype: str, quick: bool = False, disk: int | None = None,
    repair: bool = True,
) -> AuditCost:  # fmt: skip
    """Estimate what the audit of a model needs, with the captures in the cache directory; only the model's config is read.

    Args:
        model: hub id, alias or local directory; `weights` a directory whose config.json is used instead.
        probes: names of probes; None for all of them.
        quick, disk, repair: as for an audit.

    Raises:
        UsageError: unknown model, probe or dtype, or nothing fits into `disk`.
    """
    require_choice(dtype, ITEM_BYTES, what="a dtype of an audit", code="unknown-dtype")
    resolved = resolve_model(model, weights)
    check_config(resolved.spec, resolved.config, weights or Path(model))
    config = canonical(resolved.config)
    place = cache_root()
    place.mkdir(parents=True, exist_ok=True)
    chosen = affordable(
        plan_probes(config), resolved.spec, config, wanted=probes, quick=quick, disk=disk, repair=repair
    )  # fmt: skip
    cost = audit_cost(resolved, config, chosen.probes, dtype=dtype, place=place)
    return replace(cost, left_out=chosen.left_out, most_disk_bytes=chosen.needed, disk_bound_bytes=disk)


def audit_cost(
    model: ResolvedModel, config: Mapping[str, Any], probes: Sequence[Probe], *, dtype: str, place: Path
) -> AuditCost:
    """Return the estimated cost of the audit of one candidate.

    Args:
        config: the checkpoint's config in the canonical form.
        dtype: the dtype in which the models run.
        place: a directory on the disk that stores the captures.

    Raises:
        UsageError: transformers cannot build the model of this config.
    """
    parameters, active = _parameters(model, config)
    sizes, every = dims(model.spec, config), taps(model.spec, "hf", config, "")
    costs = tuple(_probe(probe, every, sizes) for probe in probes)
    weights = parameters * ITEM_BYTES[dtype]
    logits = max((one.tokens for one in costs), default=0) * sizes["d_vocab"] * ITEM_BYTES[dtype]
    operations = 2.0 * active * sum(one.tokens for one in costs)
    memory, disk = weights + logits, sum(one.audit_bytes for one in costs)
    free_memory, free_disk = psutil.virtual_memory().available, shutil.disk_usage(place).free
    fits = memory <= free_memory and disk <= free_disk
    return AuditCost(
        model=model.repo_id, architecture=model.spec.architecture, dtype=dtype, parameters=parameters, active=active,
        probes=costs, weight_bytes=weights, memory_bytes=memory, disk_bytes=disk, operations=3 * operations,
        seconds=2 * operations / _speed(getattr(torch, dtype)) + operations / _speed(torch.float64),
        free_memory_bytes=free_memory, free_disk_bytes=free_disk, fits=fits, exit_code=0 if fits else EXIT_NOT_JUDGED,
    )  # fmt: skip


def _parameters(model: ResolvedModel, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of all parameters of a model, and of those that are applied to one token."""
    sizes = [(name, one.numel()) for name, one in skeleton(model.config).named_parameters()]
    total, experts = sum(size for _, size in sizes), sum(size for name, size in sizes if EXPERTS in name)
    if not experts:
        return total, total
    chosen = spec_values(model.spec, config)[TOP_K]
    assert isinstance(chosen, (int, float))
    return total, round(total - experts * (1 - chosen / dims(model.spec, config)["n_experts"]))


def _probe(probe: Probe, every: Sequence[SiteTap], sizes: Mapping[str, int]) -> ProbeCost:
    """Return the bytes that all sites of the reference take for one probe."""
    chosen = [tap for tap in every if wanted(tap, probe) and whole_in_steps(tap, probe)]
    numbers = numbers_of(probe, chosen, sizes)
    return ProbeCost(
        name=probe.name, tokens=probe.shape[0] * probe.shape[1], native_bytes=numbers * STORED_BYTES,
        float64_bytes=numbers * FLOAT64_BYTES,
    )  # fmt: skip


def _speed(dtype: torch.dtype) -> float:
    """Return the multiplications and additions per second of a product of two matrices, the best of `REPEATS`."""
    left = torch.ones(TIMED, TIMED, dtype=dtype)
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        # The product that models use: some dtypes have a fast kernel only for this order.
        torch.nn.functional.linear(left, left)
        taken.append(time.perf_counter() - started)
    return 2.0 * TIMED**3 / min(taken)
