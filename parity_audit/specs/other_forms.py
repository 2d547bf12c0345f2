"""Errors with advice for directories that are not a checkpoint of plain weights: adapters and quantised models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity_audit.core.errors import NotJudged, UsageError

ADAPTER = "adapter_config.json"
QUANTISED = "quantization_config"


def of_no_config(folder: Path) -> UsageError:
    """Return the error for a directory without config.json; if it holds an adapter, the error says how to merge it."""
    if not (folder / ADAPTER).is_file():
        return UsageError(
            f"the directory {folder} has no config.json, so it is no checkpoint", code="unknown-model",
            hint="give the directory that holds config.json and the safetensors files",
        )  # fmt: skip
    return UsageError(
        f"{folder} holds an adapter of {_base(folder)} and no whole model", code="adapter-only", where=str(folder),
        hint="merge it into its base and audit that: peft's `PeftModel.from_pretrained(base, DIR).merge_and_unload()"
        ".save_pretrained(OUT)`, then `parity-audit OUT`; a loaded model with its adapter goes to `audit_live`",
    )  # fmt: skip


def _base(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "an unnamed model"


def require_plain_weights(config: Mapping[str, Any], where: Path) -> None:
    """Raise an error if the weights are quantised, because each loader dequantises them in its own way.

    The reference would be the dequantised model in float64, and no loader of the reference is known to give exactly that.

    Raises:
        NotJudged: `quantization_config` is in config.json.
    """
    about = config.get(QUANTISED)
    if about is None:
        return
    kind = about.get("quant_method", "an unnamed method") if isinstance(about, dict) else str(about)[:40]
    raise NotJudged(
        f"the weights are quantised ({kind}), and a reference needs plain ones", code="quantised-weights", where=str(where),
        hint="audit the checkpoint that they were made from; or dequantise them, remove `quantization_config` from config.json, "
        "and audit that; constants of the architecture can be audited with --miniature",
    )  # fmt: skip
