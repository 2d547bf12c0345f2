"""Check the question of an audit before anything runs: every option, and the settings of every BACKEND against the config."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity_audit.audit.ports import check_port
from parity_audit.capture.workspace import Workspace
from parity_audit.core.backend_ref import LIVE
from parity_audit.core.choices import nearest, require_choice
from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef
from parity_audit.core.wire import BATCH_INVARIANT, DEVICE_MAP, MAX_MEMORY, PLACES
from parity_audit.envs.recipes import backend_key, recipe_for
from parity_audit.formulas.knobs import ROWS

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
APIS = ("bridge", "hooked")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers computes by itself."""
HARNESS = ("attn_implementation", "tf32", "tp", BATCH_INVARIANT, *PLACES)
LARGEST_SEED = (1 << 63) - 1
FEWEST_SECONDS = 1.0


def check_options(*, dtype: str, device: str, seed: int, timeout: float, target: float = 0.0) -> None:
    """Refuse option values that no run can use.

    Raises:
        UsageError: an option is invalid; the message names it.
    """
    require_choice(dtype, DTYPES, what="a dtype of an audit", code="unknown-dtype")
    require_choice(device, DEVICES, what="a device of an audit", code="unknown-device")
    if device == "cuda" and not _has_gpu():
        raise UsageError("--device cuda: no GPU is here", code="no-gpu", hint="`parity-audit doctor` shows what is")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"--seed {seed} is out of range", code="bad-number", expected=f"0 to {LARGEST_SEED}")
    if not (math.isfinite(target) and target >= 0):
        raise UsageError(f"--target {target} is no distance", code="bad-number", expected="a number from 0 on")
    if not (math.isfinite(timeout) and timeout >= FEWEST_SECONDS):
        raise UsageError(f"--timeout {timeout} is too short", code="bad-number", expected="at least 1 second")


def check_weights_option(weights: Path | None, synthetic: str | None) -> None:
    """Check that `--weights` is a directory with a config.json, and that synthetic weights are not asked for as well.

    Raises:
        UsageError: it is not such a directory, or both kinds of weights were asked for.
    """
    if weights is None:
        return
    if synthetic is not None:
        raise UsageError("--weights and synthetic weights exclude each other", hint="drop --weights or --miniature")
    if not (weights / "config.json").is_file():
        raise UsageError(
            f"--weights {weights}: no directory with a config.json", code="bad-config", where=str(weights.absolute())
        )


def check_backends(refs: Sequence[BackendRef], config: Mapping[str, Any]) -> None:
    """Check the settings of every side against the settings that its backend and this model have.

    Raises:
        UsageError: a setting is unknown or has an invalid value, or a port's file or function does not exist.
    """
    for ref in refs:
        if ref.name == LIVE:
            continue
        if ref.target is not None:
            check_port(ref)
        elif ref.name == "hf":
            _check_hf(ref, config)
        elif ref.name == "spec":
            _check_spec(ref)
        elif ref.name == "transformer_lens" and "api" in ref.settings:
            backend_key(ref, recipe_for(ref).version)  # raises if this release does not have the api
            require_choice(
                ref.settings["api"], APIS, what="an api of TransformerLens", code="backend-setting", found=str(ref)
            )
        if not isinstance(ref.settings.get("tf32", False), bool):
            raise UsageError(f"tf32 is true or false in `{ref}`", code="backend-setting")


@contextlib.contextmanager
def nothing_left(workspace: Workspace) -> Iterator[None]:
    """Delete the workspace if the block raises a UsageError, so that a malformed question leaves no files behind."""
    try:
        yield
    except UsageError:
        workspace.abandon()
        raise


def _check_hf(ref: BackendRef, config: Mapping[str, Any]) -> None:
    """Check the name of the attention kernel (`org/kernel` is a kernel of the hub), and other settings as keys of the config."""
    kernel = ref.settings.get("attn_implementation", KERNELS[0])
    if not (isinstance(kernel, str) and "/" in kernel):
        require_choice(
            kernel, KERNELS, what="an attention implementation of transformers", code="backend-setting", found=str(ref)
        )
    _check_places(ref)
    others = [key for key in ref.settings if key not in HARNESS and key not in config]
    known = _config_keys(config) if others else set()
    for key in others:
        if known and key not in known:
            raise UsageError(
                f"`{key}` is no setting of hf for this model", code="backend-setting", found=str(ref),
                hint=nearest(key, (*known, *HARNESS)) or "attn_implementation, or any key of the config",
            )  # fmt: skip


def _check_places(ref: BackendRef) -> None:
    """Check the device map: a name, a device, or a mapping of modules to devices. Settings that need one require it."""
    chosen, given = ref.settings.get(DEVICE_MAP), [key for key in PLACES if key in ref.settings]
    if given and chosen is None:
        raise UsageError(
            f"`{given[0]}` belongs to a device_map", code="backend-setting", found=str(ref), hint="device_map=auto"
        )
    if chosen is None:
        return
    if ref.settings.get("tp", 1) != 1:
        raise UsageError("`device_map` and `tp` exclude each other", code="backend-setting", found=str(ref))
    if not (isinstance(chosen, (int, Mapping)) or _is_device(str(chosen))):
        require_choice(str(chosen), MAPS, what="a device_map", code="backend-setting", found=str(ref))
    if not isinstance(ref.settings.get(MAX_MEMORY, {}), Mapping):
        raise UsageError(
            "`max_memory` is a mapping of devices to their room", code="backend-setting", found=str(ref),
            hint='max_memory={"0": "20GB", "cpu": "100GB"}',
        )  # fmt: skip


def _is_device(text: str) -> bool:
    return text.partition(":")[0] in DEVICES


def _check_spec(ref: BackendRef) -> None:
    """Check that every setting of the backend `spec` is a knob of its formulas."""
    knobs = [row.name for row in ROWS]
    for key in ref.settings:
        if key not in (*knobs, "tf32", BATCH_INVARIANT):
            raise UsageError(
                f"`{key}` is no knob of the formulas", code="backend-setting", found=str(ref),
                hint=nearest(key, knobs) or "a knob of docs/knobs.md",
            )  # fmt: skip


def _config_keys(config: Mapping[str, Any]) -> set[str]:
    """Return every key of this `model_type`'s config in the installed transformers; empty if it does not know the type."""
    import transformers

    try:
        made = transformers.AutoConfig.for_model(str(config["model_type"]))
    except (KeyError, ValueError, TypeError):
        return set()
    return {*made.to_dict(), *(name for name in dir(made) if not name.startswith("_")), *config}


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available()) or shutil.which("nvidia-smi") is not None
